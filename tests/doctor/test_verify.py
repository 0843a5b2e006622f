"""`shardwise verify`: a sound job passes to the last bit; broken models fail, and what breaks them
is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.doctor import command
from shardwise.doctor.baseline import load_numbers, run_baseline
from shardwise.doctor.difference import Numbers, compare, first_difference
from shardwise.doctor.plan import Plan, Row, Variant, shrunk
from shardwise.doctor.rank import _coverage
from shardwise.train.config import DecoderConfig
from shardwise.train.config_file import load_config
from shardwise.train.order import SampleOrder

pytestmark = pytest.mark.timeout(480)  # for a loaded machine: processes that import torch

MODELS = """
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
from shardwise.comm.tree_sum import TreeSum

def datasets(section):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True)), None

class Sound(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)

    def hidden(self, x):
        return self.drop(torch.tanh(self.up(x)))

    def errors(self, batch):
        x, y = batch
        return (self.down(self.hidden(x)) - y).square()

    def forward(self, batch):
        return self.errors(batch).mean()

class BatchNorm(Sound):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def hidden(self, x):
        return torch.tanh(self.norm(self.up(x)))

class Unequal(Sound):
    "A mean over the samples that count: parts of a batch have more or fewer of them."
    def forward(self, batch):
        mask = (batch[0][:, :1] > 0.3).float()
        return (self.errors(batch) * mask).sum() / mask.sum().clamp(min=1)

class RankBranch(Sound):
    def forward(self, batch):
        loss = super().forward(batch)
        return loss * 1.5 if os.environ.get("RANK") == "1" else loss

class Outside(Sound):
    def __init__(self):
        super().__init__()
        self.scales = [nn.Parameter(torch.ones(8))]

    def hidden(self, x):
        return super().hidden(x) * self.scales[0]

class Forgetful(Sound):
    calls = 0
    def forward(self, batch):
        type(self).calls += 1
        return super().forward(batch) * (1 + 0.1 * type(self).calls)

class TwoDraws(Sound):
    def hidden(self, x):
        return torch.tanh(self.up(x)) + torch.randn(8)

class Unseeded(Sound):
    def hidden(self, x):
        generator = torch.Generator()
        generator.seed()
        return super().hidden(x) * (1 + 0.1 * torch.rand(8, generator=generator))

class RankRaises(Sound):
    def forward(self, batch):
        if os.environ.get("RANK") == "1":
            raise ValueError("no such batch")
        return super().forward(batch)

class RankEnds(Sound):
    def forward(self, batch):
        if os.environ.get("RANK") == "1":
            os._exit(7)
        return super().forward(batch)

class LosingTransport(Sound):
    "One element of what micro-batch 1 sends to rank 0 is lost: that of down.bias."
    def __init__(self):
        super().__init__()
        put = TreeSum.put
        def lose(tree, leaf, data, counts):
            if leaf == 1 and os.environ["RANK"] == "0":
                data = data.clone()
                data[-1] = 0
            put(tree, leaf, data, counts)
        TreeSum.put = lose

def build(options):
    return globals()[options["which"]]()
"""
SMALL = ["--ranks=1,2", "--strategies=full_shard", "--transports=c10d"]
SMALL += ["--steps=2", "--timed-steps=1", "--json"]


def job(folder: Path, which: str) -> Path:
    (folder / "verified.py").write_text(MODELS)
    path = folder / "job.toml"
    path.write_text(
        f'[model]\nkind = "verified:build"\nwhich = "{which}"\n'
        '[data]\nsource = "verified:datasets"\n'
        "[train]\nsteps = 4\nglobal_batch = 8\nmicro_batch = 4\n"
    )
    return path


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def plain_rows(folder: Path, which: str) -> list[Row]:
    """What one rank in plain PyTorch tells, in this process."""
    loaded = load_config(job(folder, which))
    plan = Plan(loaded, (1, 2), ("full_shard",), ("c10d",), num_steps=2, folder=folder)
    return run_baseline(plan)


def verify(capsys: Any, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = command.main(arguments)
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] == (code == 0)
    return code, {f"{row['rung']}: {row['what']}": row for row in result["rows"]}


def test_a_sound_model_passes_to_the_last_bit(tmp_path: Path, capsys: Any) -> None:
    """Dropout included; after a kill too."""
    code, rows = verify(capsys, str(job(tmp_path, "Sound")), *SMALL)
    assert code == 0, rows
    assert {row["result"] for row in rows.values()} == {"PASS"}
    ranks = rows["3 ranks: 2 ranks, full_shard, c10d"]
    assert ranks["detail"] == "to the last bit"
    assert ranks["step_s"] > 0 and ranks["peak_bytes"] > 2**20 and ranks["moved_bytes"] > 0
    assert 0 <= ranks["waiting"] <= 1
    assert "4 resume: 2 -> 1 rank, saved, killed, resumed" in rows


def test_a_branch_on_the_rank_fails_and_is_named(tmp_path: Path, capsys: Any) -> None:
    code, rows = verify(capsys, str(job(tmp_path, "RankBranch")), *SMALL)
    assert code == 1
    failed = rows["3 ranks: 2 ranks, full_shard, c10d"]
    assert failed["result"] == "FAIL"
    assert "step 1: gradient of up.weight[" in failed["detail"]
    assert " instead of " in failed["detail"]
    assert rows["2 engine: 1 rank, full_shard, auto"]["result"] == "PASS"


def test_a_gradient_that_a_transport_loses_fails_and_is_named(tmp_path: Path, capsys: Any) -> None:
    code, rows = verify(capsys, str(job(tmp_path, "LosingTransport")), *SMALL)
    assert code == 1
    failed = rows["3 ranks: 2 ranks, full_shard, c10d"]
    assert failed["result"] == "FAIL"
    assert failed["detail"].startswith("step 1: gradient of down.bias[0] is ")
    assert failed["detail"].endswith(" (1 of 1 elements differ)")
    assert rows["2 engine: 1 rank, full_shard, auto"]["result"] == "PASS"


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("RankRaises", "rank 1: ValueError: no such batch"),
        ("RankEnds", "rank 1: the process ended without a word"),
    ],
)
def test_a_rank_that_raises_or_ends_is_a_row(
    tmp_path: Path, capsys: Any, which: str, said: str
) -> None:
    """The rows before and after it are there."""
    code, rows = verify(capsys, str(job(tmp_path, which)), *SMALL)
    assert code == 1
    failed = rows.pop("3 ranks: 2 ranks, full_shard, c10d")
    assert (failed["result"], failed["detail"]) == ("FAIL", said)
    assert rows["2 engine: 1 rank, full_shard, auto"]["result"] == "PASS"
    [resume] = [row for name, row in rows.items() if name.startswith("4 resume")]
    assert resume["result"] == "FAIL" and said in resume["detail"]


def test_batch_norm_fails_and_the_rest_is_compared_with_a_tolerance(
    tmp_path: Path, capsys: Any
) -> None:
    code, rows = verify(capsys, str(job(tmp_path, "BatchNorm")), *SMALL)
    assert code == 1
    assert [name for name, row in rows.items() if row["result"] == "FAIL"] == [
        "1 plain: a batch in parts and at once"
    ]
    assert "norm: BatchNorm1d" in rows["1 plain: a batch in parts and at once"]["detail"]
    skipped = rows["2 engine: comparing bits"]
    assert skipped["result"] == "SKIP" and "running statistics" in skipped["detail"]
    assert "within 1e-3" in rows["3 ranks: 2 ranks, full_shard, c10d"]["detail"]


@pytest.mark.parametrize(
    ("which", "row", "result", "said"),
    [
        ("Sound", 2, "PASS", "within 1e-3"),
        ("BatchNorm", 2, "FAIL", "gradient of up.weight["),
        ("Unequal", 2, "FAIL", "unequal numbers of tokens"),
        ("TwoDraws", 2, "SKIP", "draws random numbers"),
        ("Outside", 1, "FAIL", "scales[0]: takes part in the loss"),
        ("Forgetful", 0, "FAIL", "weight of up.weight["),
        ("Unseeded", 0, "FAIL", "weight of up.weight["),
    ],
)
@pytest.mark.usefixtures("torch_as_it_was")
def test_what_one_rank_tells(tmp_path: Path, which: str, row: int, result: str, said: str) -> None:
    rows = plain_rows(tmp_path, which)
    assert rows[row].result == result, rows
    assert said in rows[row].detail
    numbers = load_numbers(tmp_path, 2)
    assert set(numbers.grads) <= set(numbers.weights)


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_is_not_cut(width: int) -> None:
    import io

    from rich.console import Console

    from shardwise.doctor.table import show

    row = Row("3 ranks", "2 ranks, hybrid_full_optimizer, shared_memory", "PASS", "to the last bit")
    row.step_s = row.waiting = row.moved_bytes = row.peak_bytes = 1
    out = io.StringIO()
    show(Console(file=out, width=width), [row], "job.toml")
    text = out.getvalue()
    assert "hybrid_full_optimizer, shared_memory" in text and "to the last bit" in text
    assert "…" not in text and all(len(line) <= width for line in text.splitlines())


def test_short_names_of_strategies(tmp_path: Path) -> None:
    args = command.parser().parse_args(["--strategies=zero3,DDP,full_shard"])
    assert command.plan_of(args, tmp_path).strategies == ("full_shard", "no_shard")


def test_mistakes_are_one_line(tmp_path: Path, capsys: Any) -> None:
    for arguments, said in (
        (["nowhere.toml"], "nowhere.toml: no such file"),
        (["--ranks=0"], "--ranks: expected whole numbers from 1, found '0'"),
        (["--strategies=zero9"], "--strategies: there are full_shard"),
        (["--steps=1"], "--steps: expected whole numbers from 2"),
        (["--nope"], "--nope"),
    ):
        assert command.main(arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1 and said in shown.err


def test_the_decoder_is_shrunk_and_a_model_of_ones_own_is_not(tmp_path: Path) -> None:
    config = shrunk(load_config(None, [("model.kv_heads", "2")]).config, 4, 4)
    assert isinstance(config.model, DecoderConfig)
    assert (config.model.dim, config.model.layers, config.model.kv_heads) == (32, 2, 1)
    assert (config.train.global_batch, config.train.micro_batch) == (16, 4)
    own = load_config(job(tmp_path, "Sound")).config
    assert shrunk(own, 4, 4).model == own.model
    wires = [("shard.gather_wire", "int8"), ("shard.reduce_wire", "int8")]
    wires += [("shard.error_feedback", "true"), ("shard.host_ranks", "2")]
    section = shrunk(load_config(None, wires).config, 4, 4).shard
    assert section == shrunk(load_config(None, []).config, 4, 4).shard, "rounding is no mistake"


def test_which_variants_there_are(tmp_path: Path) -> None:
    loaded = load_config(None)
    plan = Plan(loaded, (1, 2, 4), ("no_shard", "hybrid_shard"), ("c10d",), 2, tmp_path)
    assert plan.variants() == [
        Variant(1),
        Variant(2, "no_shard", "c10d"),
        Variant(4, "no_shard", "c10d"),
        Variant(4, "hybrid_shard", "c10d"),
    ]
    assert plan.num_micro_batches == 4


def test_a_sample_read_twice_is_told() -> None:
    config = SimpleNamespace(run=SimpleNamespace(seed=0), train=SimpleNamespace(global_batch=4))
    running: Any = SimpleNamespace(
        config=config, data=SimpleNamespace(train=range(10)), step=1, position=0
    )
    samples = [int(i) for i in SampleOrder(10, 0).indices(0, 4)]
    assert _coverage(running, 0, [samples[:2], samples[2:]]) == ""
    twice = _coverage(running, 0, [samples[:2], samples[:2]])
    assert "was read 2 times (ranks [0, 1]) instead of 1" in twice or "0 times" in twice


def test_the_first_difference_has_both_values() -> None:
    ours = {"a": torch.ones(2, 2), "b": torch.tensor([1.0, 2.0])}
    theirs = {"a": torch.ones(2, 2), "b": torch.tensor([1.0, 2.5])}
    assert compare(ours, ours, "weight", exact=True) == ""
    expected = "weight of b[1] is 2.0 instead of 2.5 (1 of 2 elements differ)"
    assert compare(ours, theirs, "weight", exact=True) == expected
    close = {**theirs, "b": theirs["b"] * (1 + 1e-5)}
    assert compare(close, theirs, "gradient", exact=False) == ""
    assert "gradient of b[1] is 2.500" in compare(close, theirs, "gradient", exact=True)
    nan = {**theirs, "b": torch.tensor([1.0, float("nan")])}
    assert "b[1] is nan" in compare(nan, theirs, "gradient", exact=False)
    assert compare({}, ours, "gradient", exact=True) in {
        f"{n}: has a gradient in the baseline only" for n in ours
    }
    a, b = Numbers(1.0, ours, ours), Numbers(1.1, ours, ours)
    assert first_difference(a, b, 3, exact=True) == "step 3: the loss is 1.0 instead of 1.1"
