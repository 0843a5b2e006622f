"""A step is walked before it runs: its events are those that the engine records, its bytes those
that are counted while it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from ranks import on_ranks
from shardwise.plan.walk import Way, walk
from shardwise.train.calling import outputs_of
from shardwise.train.config_file import load_config
from shardwise.train.model import build_model, fill, plan_of, shard
from shardwise.train.planned import Traces, step_of

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
CPU = torch.device("cpu")
JOB = {
    "model.dim": 64, "model.layers": 4, "model.vocab_size": 640, "data.seq_len": 32,
    "train.micro_batch": 2, "train.global_batch": 4, "shard.transport": "c10d",
    "shard.unit": "Block",
}  # fmt: skip


def config_of(**changes: Any) -> Any:
    values = JOB | {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(None, [(key, str(value)) for key, value in values.items()]).on(2).config


WAYS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "shard_grad_op": {"shard__strategy": "shard_grad_op"},
    "no_shard": {"shard__strategy": "no_shard"},
    "recomputed": {"shard__activation_checkpointing": "full"},
    "several modules a unit": {"shard__unit": "auto"},
    "units in units": {"shard__unit": "Block,Attention"},
    "two micro-batches": {"train__global_batch": 8},
    "deferred": {"train__global_batch": 8, "shard__strategy": "shard_optimizer"},
}


def recorded(model: Any, config: Any, *, num: int) -> str:
    tokens = torch.zeros(config.train.micro_batch, config.data.seq_len + 1, dtype=torch.long)

    def step() -> None:
        for number in range(num):
            waits = number < num - 1 and config.shard.strategy == "shard_optimizer"
            model.set_requires_gradient_sync(not waits)
            outputs_of(model, tokens)["loss"].backward()
        for p in model.parameters():
            p.data.mul_(1.0)  # a step writes
            p.grad = None

    step()
    with sw.record_events(model) as log:
        step()
    return log.text()


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["plain", "ahead"])
@on_ranks(2)
def test_events_are_those_that_the_engine_records(name: str, runs_ahead: bool, world: int) -> None:
    config = config_of(**WAYS[name])
    model = build_model(config, None)
    plan = plan_of(model, config, world)
    num = config.train.global_batch // (config.train.micro_batch * world)
    trace, is_known = Traces(model).of(plan, config)
    assert is_known
    expected = walk(plan, trace, Way(micro_batches=num, runs_ahead=runs_ahead)).text()
    shard(model, config, CPU, world)
    fill(model, config, CPU)
    sw.set_prefetch(model, runs_ahead)
    assert recorded(model, config, num=num) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"shard.activation_checkpointing": "full", "shard.param_dtype": "bfloat16"},
        {"shard.strategy": "shard_grad_op", "train.global_batch": 8},
    ],
    ids=["recomputed", "kept"],
)
@on_ranks(2)
def test_bytes_are_those_that_are_counted(
    changes: dict[str, Any], rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of benchmarks/plan_memory.py: exact for what the engine owns and what it receives,
    never below for activations, at most 5% above."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("plan_memory", None)
    import plan_memory

    found = plan_memory.measure(rank, JOB | changes, str(tmp_path))
    assert found["is_known"]
    if rank == 0:  # it owns most
        assert plan_memory.wrong(found) == []


def test_the_peak_is_told_with_its_moment() -> None:
    """Scores of a large vocabulary: in the loss, or at the start of its backward; with many blocks
    and few scores, inside of a block."""
    for changes, moments in (
        ({"model__vocab_size": 60_000}, ("loss", "backward of the loss")),
        ({"model__layers": 12, "model__vocab_size": 16}, ("forward", "backward")),
    ):
        config = config_of(**changes)
        model = build_model(config, None)
        plan = plan_of(model, config, 2)
        peak = step_of(plan, config, 2, Traces(model)).walk.peak
        assert peak.moment in moments, peak
        assert peak.total == sum(peak.parts.values())
