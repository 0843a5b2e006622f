"""`shardwise doctor RUN`: each planted fault is found and named first; healthy runs have none."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import planted
import pytest

from ranks import run_ranks, spawn_ranks
from shardwise.cli import main
from shardwise.doctor.finding import Finding
from shardwise.doctor.run.case import Case
from shardwise.doctor.run.checks import examine, facts

pytestmark = pytest.mark.timeout(240)  # for a loaded machine


def without(keys: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key != name}


# The fault's name -> keys of the job that has it, and what evidence or remedy must say.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "units": (
        planted.TINY | {"shard.unit": "embedding", "model.layers": 6, "model.dim": 128},
        "shard.unit",
    ),
    "loss-no-number": (planted.TINY | {"optim.lr": 1e30}, "optim.lr"),
    "diverges": (
        planted.TINY
        | {
            "optim.lr": 10.0,
            "train.steps": 32,
            "optim.schedule": "constant",
            "optim.warmup_steps": 24,
        },
        "optim.lr",
    ),
    "never-evaluated": (
        without(planted.TINY, "train.eval_samples") | {"train.eval_every": 0},
        "train.eval_every",
    ),
    "saves-too-often": (planted.TINY | {"checkpoint.every": 1}, "checkpoint.every"),
    "warm-up-never-ends": (planted.TINY | {"optim.warmup_steps": 100}, "optim.warmup_steps"),
    "communication": (
        planted.TINY
        | {
            "train.micro_batch": 1,
            "train.global_batch": 8,
            "model.dim": 384,
            "train.steps": 8,
            "data.seq_len": 8,
            "shard.transport": "c10d",
        },
        "train.micro_batch",
    ),
    "data-starved": (planted.OWN | {"data.source": "planted:slow"}, "data.source"),
    "same-samples": (planted.OWN | {"data.source": "planted:deaf"}, "data.source"),
    "straggler": (planted.OWN | {"data.source": "planted:slow_on_one"}, "rank 1"),
    "slower": (planted.OWN | {"model.kind": "planted:slower", "train.steps": 40}, "log.profile"),
    "overfits": (
        planted.OWN | {"data.source": "planted:noise", "train.steps": 60, "optim.lr": 0.01},
        "checkpoint.best",
    ),
}
# Those that only a fresh process shows: the highest use of one that lived on would hide them.
OF_MEMORY: dict[str, tuple[dict[str, Any], str]] = {
    "memory-grows": (planted.OWN | {"model.kind": "planted:keeps", "train.steps": 24}, "a step"),
    "buffers": (planted.OWN | {"model.kind": "planted:table"}, "100.0 MiB"),
    "activations": (
        planted.TINY
        | {
            "model.dim": 64,
            "model.layers": 4,
            "data.seq_len": 512,
            "train.micro_batch": 48,
            "train.global_batch": 96,
            "train.steps": 2,
            "optim.warmup_steps": 1,
            "train.eval_samples": 2,
        },
        "activation_checkpointing",
    ),
    "logits": (
        planted.TINY
        | {
            "model.vocab_size": 16384,
            "data.seq_len": 256,
            "train.micro_batch": 16,
            "train.global_batch": 32,
            "train.steps": 2,
            "optim.warmup_steps": 1,
            "train.eval_samples": 2,
        },
        "train.micro_batch = 8",
    ),
}


def found_in(directory: Path) -> list[Finding]:
    return examine(Case(directory))


def text_of(finding: Finding) -> str:
    return f"{finding.title}\n{finding.evidence}\n{finding.meaning}\n{finding.remedy}"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_first(tmp_path: Path, name: str) -> None:
    keys, said = FAULTS[name]
    run_ranks(2, planted.run, tmp_path / "run", keys)
    found = found_in(tmp_path / "run")
    assert [f.name for f in found][:1] == [name], found
    assert said in text_of(found[0])


@pytest.mark.parametrize("name", OF_MEMORY)
def test_memory_that_did_not_fall(tmp_path: Path, name: str) -> None:
    keys, said = OF_MEMORY[name]
    with spawn_ranks(2, planted.run, tmp_path / "run", keys) as group:
        group.join()
    found = found_in(tmp_path / "run")
    assert [f.name for f in found][:1] == [name], found
    assert said in text_of(found[0])


HEALTHY = {
    "decoder": planted.TINY | {"train.steps": 24},
    "evaluated, saved": planted.TINY | {"train.steps": 24, "checkpoint.every": 12},
    "of a user": planted.OWN | {"train.steps": 24},
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("keys", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_has_no_finding(tmp_path: Path, keys: dict[str, Any], world: int) -> None:
    """A fault would be there again; what a busy machine did to one run is not."""
    for directory in (tmp_path / "run", tmp_path / "again"):
        run_ranks(world, planted.run, directory, keys)
        if not (found := found_in(directory)):
            break
    assert found == []
    assert main(["doctor", str(directory)]) == 0


def test_the_work_of_one_rank(tmp_path: Path) -> None:
    keys = planted.OWN | {"model.kind": "planted:slow_rank"}
    run_ranks(2, planted.run, tmp_path / "run", keys)
    (first, *_) = found_in(tmp_path / "run")
    assert first.name == "straggler" and "rank 1 is behind" in first.title


@pytest.mark.parametrize("model", ["counts", "plain"])
def test_units_that_are_compiled_again(tmp_path: Path, model: str) -> None:
    keys = planted.OWN | {"model.kind": f"planted:{model}", "shard.compile": True}
    keys |= {"shard.unit": "Counted" if model == "counts" else "Linear", "train.eval_every": 6}
    run_ranks(2, planted.run_compiled, tmp_path / "run", keys)
    found = [finding for finding in found_in(tmp_path / "run") if finding.name == "recompiles"]
    assert len(found) == (model == "counts")
    assert not found or "shard.compile = false" in found[0].remedy


def test_killed_and_started_again(tmp_path: Path) -> None:
    run, keys = tmp_path / "run", planted.TINY | {"checkpoint.every": 4}
    run_ranks(2, planted.run, run, keys, 7)
    (first, *_) = found_in(run)
    assert first.name == "killed" and "after step 6" in first.title and "step 4" in first.remedy
    run_ranks(2, planted.run, run, keys)
    assert "killed" not in [finding.name for finding in found_in(run)]


def test_files_that_are_half_written_or_older(tmp_path: Path, capsys) -> None:
    """A run that is being written, one of a version that recorded less, one that is no run."""
    run = tmp_path / "run"
    run_ranks(2, planted.run, run, planted.TINY)
    for name in ("metrics.jsonl", "log.jsonl", "ranks.jsonl"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole + b'{"step": 13, "loss": [1.2, \x00')
    assert main(["doctor", str(run)]) == 0
    (run / "log.jsonl").unlink()
    (run / "ranks.jsonl").unlink()
    capsys.readouterr()
    assert main(["doctor", str(run), "--json"]) == 0
    assert "an older version" in json.loads(capsys.readouterr().out)["notes"][0]
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe")
    assert main(["doctor", str(run)]) == 2
    (run / "metrics.jsonl").unlink()
    assert main(["doctor", str(run)]) == 0  # begun, and no step yet
    (run / "config.toml").write_text("[train]\nsteps = ")
    assert main(["doctor", str(run)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_run_that_goes_on_is_not_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(2, planted.run, run, planted.TINY | {"checkpoint.every": 4}, 7)
    descriptor = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert Case(run).is_live and "killed" not in [finding.name for finding in found_in(run)]
    finally:
        os.close(descriptor)
    assert found_in(run)[0].name == "killed"


def test_one_rank_and_what_it_cannot_use(tmp_path: Path) -> None:
    keys = planted.TINY | {"shard.strategy": "full_shard", "shard.gather_limit": "1MiB"}
    run_ranks(1, planted.run, tmp_path / "run", keys)
    found = found_in(tmp_path / "run")
    assert {f.name for f in found} == {"no-effect-strategy", "no-effect-gather-limit"}
    assert main(["doctor", str(tmp_path / "run")]) == 0  # hints


OTHERS = (None, True, "text", [], {}, -1, 1e300)


def test_any_value_may_be_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at as they are; a value of another kind is never a traceback."""
    run = tmp_path / "run"
    run_ranks(2, planted.run, run, planted.TINY | {"checkpoint.every": 1})
    monkeypatch.setattr(Case, "predicted", None)
    for name in ("metrics.jsonl", "log.jsonl", "ranks.jsonl"):
        whole = (run / name).read_text()
        rows = [json.loads(line) for line in whole.splitlines()]
        for key in {key for row in rows for key in row}:
            for other in OTHERS:
                changed = [row | {key: other} if key in row else row for row in rows]
                (run / name).write_text("".join(json.dumps(row) + "\n" for row in changed))
                case = Case(run)
                assert all(isinstance(finding, Finding) for finding in examine(case))
                assert facts(case)["run"] == str(run)
        (run / name).write_text(whole)


def test_what_ranks_were_warned_of(tmp_path: Path) -> None:
    keys = planted.OWN | {"data.source": "planted:pauses"}
    with spawn_ranks(2, planted.run_warned, tmp_path / "run", keys) as group:
        group.join()
        said = group.output(0)
    (warned,) = [finding for finding in found_in(tmp_path / "run") if finding.name == "warned"]
    assert "rank_00000.log" in warned.evidence and "waits for rank 1" in warned.evidence
    assert "waits for rank 1" in said, "the terminal shows them as before"
