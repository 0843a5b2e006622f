"""What people watch: trackers, loss.png, the best checkpoint, early stops, samples, speed,
traces."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import checkpoint_names, read_rows, run_job
from torch import nn

from ranks import on_ranks, run_ranks
from shardwise import set_wait_limit
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import ConfigError
from shardwise.train.best import Best
from shardwise.train.config_file import load_config
from shardwise.train.console import Console
from shardwise.train.run_dir import finished
from shardwise.train.speed import flops_per_token, peak_flops
from shardwise.train.trackers import Run, Trackers, chosen
from shardwise.train.waiting import Patience

ROWS = [(1, None), (2, 3.0), (4, 2.0), (6, 2.5), (8, 2.0), (10, 1.5)]


def test_the_best_evaluation_and_patience() -> None:
    rows = [{"step": s, "loss": 1.0} | ({"val_loss": v} if v else {}) for s, v in ROWS]
    best = Best.of_rows(rows[:5])
    assert (best.loss, best.step, best.since) == (2.0, 4, 2)
    assert best.has_lost(2) and not best.has_lost(3) and not best.has_lost(0)
    assert best.take(10, 1.5) and best == Best.of_rows(rows) and best.since == 0


def test_flops() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 10))
    assert flops_per_token(model) == 6 * (16 + 50)
    model[1].weight.requires_grad_(False)
    assert flops_per_token(model) == 4 * 16 + 6 * 50
    model[2].weight = model[0].weight  # tied: it multiplies
    assert flops_per_token(model) == 4 * 16 + 6 * 50
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA GeForce GT 710", "float32") is None


def test_memory_mfu_and_time_left_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("shardwise.train.console.time.monotonic", lambda: now[0])
    console = Console(total_steps=110, line_every=1, silent=False)
    console.start(10)  # a resumed run: its own speed counts
    now[0] += 20
    row = {"step": 20, "loss": 1.0, "lr": 0.1, "mfu": 0.4321, "peak_memory_bytes": 3 * 2**29}
    console.step(row)
    assert capsys.readouterr().out == (
        "step  20/110  loss 1.0000  lr 1.00e-01  mem 1.50 GiB  mfu 43.2%  eta 0:03:00\n"
    )
    console.step({"step": 0, "val_loss": 2.0})  # before the first step: no rate, no speed
    assert capsys.readouterr().out == "step   0/110  val_loss 2.0000\n"


@pytest.mark.parametrize(
    ("began", "total", "shown"),
    [
        (0, 3, [1, 3]),
        (0, 1, [1]),
        (0, 10, [1, 10]),
        (0, 12, [10, 12]),
        (10, 15, [11, 15]),
        (8, 21, [10, 20, 21]),
    ],
)
def test_a_short_run_shows_its_first_step_and_its_last(
    began: int, total: int, shown: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(total_steps=total, line_every=10, silent=False)
    console.start(began)
    for step in range(began + 1, total + 1):
        console.step({"step": step, "loss": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0].split()[1]) for line in lines] == shown


# -- waits ---------------------------------------------------------------------------------------
@pytest.mark.slow
@on_ranks(2)
def test_who_waits_for_work_says_so_once(rank: int) -> None:
    """By name and not as a warning."""
    warned: list[str] = []
    logger, handler = logging.getLogger("shardwise.comm.waits"), logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    patience, ranks = Patience(rank), Ranks()
    logger.addHandler(handler)
    logger.addFilter(patience)
    set_wait_limit(warn_after=3)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            for _ in range(2):
                ranks.on_rank0(lambda: time.sleep(5), "knitting")
    finally:
        set_wait_limit()
        logger.removeHandler(handler)
        logger.removeFilter(patience)
    assert warned == []
    assert said.getvalue() == ("rank 1 waits for rank 0: knitting\n" if rank else "")


def test_other_waits_stay_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    def is_shown(rank: int, text: str) -> bool:
        return Patience(rank).filter(logging.LogRecord("", 30, "", 0, text, (), None))

    head = "rank 2 (outside of a step) has waited 6 s for all ranks, preparing the data"
    lines = ["  rank 0: at work: a, for 6 s", "  rank 1: waits for x", "  rank 2: waits for x"]
    quiet = "\n".join([head, *lines])
    assert not is_shown(2, quiet)
    assert not capsys.readouterr().out  # rank 1 says it for both
    assert not is_shown(1, quiet)
    assert capsys.readouterr().out == "rank 1 waits for rank 0: a\n"
    assert is_shown(1, quiet.replace("at work: a, for 6 s", "in user code"))
    assert is_shown(1, quiet.replace("rank 2: ", "rank 2: stopped (process 7), "))
    assert is_shown(1, quiet.replace("all ranks, preparing the data", "an all-gather of layers.0"))


# -- trackers ------------------------------------------------------------------------------------
class Recorded:
    """A service that notes its calls; `log` of step 3 raises once it is `broken`."""

    def __init__(self, broken: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.broken = broken

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.broken and kwargs.get("step") == 3:
                raise ConnectionError("the service\nis gone")
            self.calls.append((name, args, kwargs))
            info = SimpleNamespace(run_id="r1")
            return SimpleNamespace(id="r1", info=info, log=self.log, finish=self.finish)

        if name.startswith("__"):
            raise AttributeError(name)
        return call


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_services_get_numbers_and_go_on_under_their_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Any = Recorded()
    monkeypatch.setitem(sys.modules, name, service)
    said: list[str] = []
    for _ in range(2):
        trackers = Trackers(said.append)
        trackers.open([name], Run(tmp_path, 0, {"run": {"seed": 0}}))
        trackers.numbers({"step": 1, "loss": 2.0, "note": "no number"})
        trackers.text(1, "sample", "text")
        trackers.close()
    assert not said
    calls = [(method, args, kwargs) for method, args, kwargs in service.calls]
    assert sum(args[:1] == ({"loss": 2.0},) and k["step"] == 1 for _, args, k in calls) == 2
    assert any("text" in str(args) for _, args, _ in calls)
    if name != "trackio":
        assert (tmp_path / f"{name}_id").read_text() == "r1"
        assert any("r1" in (k.get("id"), k.get("run_id")) for _, _, k in calls)


def test_a_tracker_that_fails_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", Recorded(broken=True))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mlflow", None)  # type: ignore[arg-type]  # cannot be imported
    said: list[str] = []
    trackers = Trackers(said.append)
    trackers.open(["trackio", "mlflow"], Run(tmp_path, 0, {}))
    for step in range(1, 6):
        trackers.numbers({"step": step, "loss": 1.0})
    trackers.close()
    assert [text.partition(":")[2].split()[0] for text in said] == ["mlflow", "trackio"]
    assert said[1].endswith("is left out: ConnectionError: the service is gone")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("wandbb", "'wandbb' is no tracker; did you mean wandb?"),
        ("auto,wandb", "auto stands alone"),
        ("trackio", "needs the package trackio, which is not installed: pip install trackio"),
    ],
)
def test_trackers_that_cannot_be(names: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.train.trackers._is_installed", lambda name: name == "wandb")
    with pytest.raises(ConfigError) as caught:
        load_config(None, [("log.trackers", names)])
    assert text in str(caught.value) and str(caught.value).startswith("--log.trackers: ")
    assert chosen(["auto"]) == [] and chosen(["none"]) == [] and chosen(["wandb"]) == ["wandb"]


# -- in a job ------------------------------------------------------------------------------------
@on_ranks(2)
def test_files_of_a_run(rank, tmp_path):
    """TensorBoard's events, loss.png, a trace for each rank; numbers are those of metrics.jsonl."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("matplotlib")
    run = tmp_path / "run"
    options = {"log__trackers": "auto", "log__profile_steps": "2", "train__steps": 4}
    run_job(run, stop_after=2, **options)
    run_job(run, **options)
    if rank:
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    found = {e.step: e.value for e in events.Scalars("loss")}
    assert found == pytest.approx({r["step"]: r["loss"] for r in read_rows(run)})
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    traces = sorted((run / "profile").iterdir())
    assert [t.name for t in traces] == [f"step_00000002_rank_{r}.json" for r in (0, 1)]
    assert "traceEvents" in json.loads(traces[0].read_text())


@on_ranks(2)
def test_the_best_is_kept_and_the_run_ends_early(rank, tmp_path):
    """A rate that makes the loss grow after the first steps; a resume judges alike."""
    run = tmp_path / "run"
    options = {
        "train__steps": 30, "train__eval_every": 2, "train__patience": 2, "checkpoint__best": True,
        "optim__lr": 0.3, "optim__warmup_steps": 8, "optim__schedule": "constant",
    }  # fmt: skip
    run_job(run, stop_after=5, **options)
    run_job(run, **options)
    rows = [row for row in read_rows(run) if "val_loss" in row]
    best = min(rows, key=lambda row: row["val_loss"])
    assert rows[-1]["step"] == best["step"] + 4 < 30
    assert [p.name for p in (run / "best").iterdir()] == [f"step_{best['step']:08d}"]
    assert checkpoint_names(run)[-1] == f"step_{rows[-1]['step']:08d}"
    run_job(run, **options)  # nothing is left to do
    config = load_config(run / "config.toml").config
    assert f"ended early at step {rows[-1]['step']} of 30" in finished(config)
    more = dataclasses.replace(config, train=dataclasses.replace(config.train, patience=9))
    assert not finished(more), "a scheduler may start it again"
    assert [p.name for p in (run / "best").iterdir()] == [f"step_{best['step']:08d}"]
    assert read_rows(run)[-1]["step"] == rows[-1]["step"]
    dist.barrier()  # both have looked
    if rank == 0:  # a start from before that step: what is kept is not its own
        from shardwise.train.job import _open_run_dir
        from shardwise.train.run_dir import RunDir

        config = load_config(run / "config.toml").config
        _open_run_dir(config, RunDir(config), Best(1.0, step=best["step"] - 2))
        assert not [p for p in (run / "best").iterdir() if p.name.startswith("step_")]


@on_ranks(2)
def test_an_evaluation_before_the_first_step(tmp_path):
    """A row of its own, which counts for nothing; a start that comes again writes it once."""
    run = tmp_path / "run"
    options = {"train__eval_at_start": True, "train__eval_every": 2, "train__patience": 1}
    run_job(run, die_in=2, train__steps=4, **options)  # before any checkpoint
    assert [row["step"] for row in read_rows(run)] == [0, 1]
    run_job(run, train__steps=4, **options, log__trackers="figure")
    rows = read_rows(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert set(rows[0]) == {"step", "val_loss"}
    assert rows[0]["val_loss"] > rows[4]["val_loss"]
    assert Best.of_rows(rows[:1]).step == 0 and Best.of_rows(rows[:1]).since == 0
    assert Best.of_rows([rows[0] | {"val_loss": 0.0}, rows[2]]).step == 2


def test_patience_needs_held_out_data() -> None:
    from shardwise.train.job import _check_held_out

    loaded = load_config(None, [("train.patience", "2")])
    data: Any = SimpleNamespace(held_out=None)
    with pytest.raises(ConfigError, match=r"--train.patience: needs val_loss, but the data has"):
        _check_held_out(loaded, data)


# -- samples of text -----------------------------------------------------------------------------
class Tokenizer:
    """Letters are tokens."""

    eos_token_id, chat_template = 0, None

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in ids)


class NextLetter(nn.Module):
    """Says the letter that follows, and ends behind e."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))
        self.calls = 0

    def forward(self, input_ids: Any, use_cache: bool = True) -> Any:
        self.calls += 1
        follows = torch.where(input_ids == ord("e"), 0, input_ids + 1)
        logits = nn.functional.one_hot(follows, 128) * self.one
        return SimpleNamespace(logits=logits)


def test_samples_are_the_likeliest_tokens() -> None:
    from shardwise.train.sampling import sample_texts

    log = SimpleNamespace(samples=("ab", "d"), sample_tokens=6)
    config = SimpleNamespace(log=log, data=SimpleNamespace(format="text"))
    job: Any = SimpleNamespace(model=NextLetter(), config=config, device=torch.device("cpu"))
    assert sample_texts(job, Tokenizer()) == [("ab", "cde"), ("d", "e")]
    assert job.model.calls == 12  # as many whatever the text


def test_samples_need_a_model_with_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match=r"--log.samples: needs model.kind = 'hf'"):
        load_config(None, [("log.samples", "Hello")])


def sampled(rank: int, world: int, directory: str) -> list[tuple[str, str]]:
    """What a job on a model of transformers says at its evaluations."""
    from hf_kit import make_directory, make_tokenizer, run_hf_job

    from shardwise.train import loop, sampling

    folder, found = Path(directory), []

    def recorded(job: Any, tokenizer: Any) -> list[tuple[str, str]]:
        found.extend(sampling.sample_texts(job, tokenizer))
        return found

    model = make_directory("llama_tied", folder / "model")
    if rank == 0:
        make_tokenizer(model)
    torch.distributed.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "sample_texts", recorded)
        options = {"train__eval_every": 2, "train__eval_samples": 4, "log__sample_tokens": 5}
        run_hf_job(folder / "run", model, log__samples="w1 w2 w3,w9", **options)
    return found


def test_samples_of_a_job_are_what_the_exported_model_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from hf_kit import loaded

    from shardwise.train.hf.generate import answer_to, tokenizer_of

    one, two = run_ranks(2, sampled, str(tmp_path), timeout_s=200.0)
    assert one == two and [prompt for prompt, _ in one] == ["w1 w2 w3", "w9"]
    model = loaded(tmp_path / "run" / "model")
    tokenizer = tokenizer_of(tmp_path / "run" / "model")
    how = {"use_chat": False, "max_new_tokens": 5, "do_sample": False}
    assert one == [(p, answer_to(model, tokenizer, p, **how)) for p, _ in one]
