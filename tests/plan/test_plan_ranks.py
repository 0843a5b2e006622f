"""Times of CPU ranks: what a step computes is counted from the model's own step, and comes out as
long as the tables say, which are made up here."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise._torch_compat import FakeTensorMode
from shardwise.cli import main
from shardwise.plan.links import read_off
from shardwise.plan.measured import Rates, read_rates
from shardwise.plan.operators import Operator, Watched
from shardwise.plan.ranks import Stepping, ranks_step_time
from shardwise.train.config_file import load_config
from shardwise.train.model import build_model, plan_of
from shardwise.train.planned import Traces
from shardwise.train.planned_time import time_on_ranks

JOB = {
    "model.dim": 64, "model.layers": 3, "model.heads": 4, "model.vocab_size": 97,
    "data.seq_len": 32, "train.micro_batch": 2, "train.global_batch": 4, "shard.unit": "Block",
}  # fmt: skip
PER_FLOP, PER_BYTE, RECEIVED = 1e-9, 1e-8, 1e-7


def rates(**changes: Any) -> Rates:
    """Seconds in proportion to amounts, however small."""
    kinds = dict.fromkeys(("product", "attention", "attention backward"), PER_FLOP)
    kinds |= {"elementwise": 0.0, "adamw": PER_BYTE} | changes
    tables = {(kind, "float32"): {1e-9: each * 1e-9 or 1e-30, 1.0: each or 1e-30}
              for kind, each in kinds.items()}  # fmt: skip
    moved = {(transport, kind): {1e-9: RECEIVED * 1e-9, 1.0: RECEIVED}
             for transport in ("shared_memory", "c10d")
             for kind in ("gather", "reduce", "all_reduce")}  # fmt: skip
    return Rates(2, 1, 0.0, tables, moved)


def planned(model: Any = None, **changes: Any) -> tuple[Any, Any, Any]:
    values = JOB | {key.replace("__", "."): value for key, value in changes.items()}
    config = load_config(None, [(k, str(v)) for k, v in values.items()]).on(2).config
    model = build_model(config, None) if model is None else model
    return config, plan_of(model, config, 2, on_accelerator=False), Traces(model)


def step(**changes: Any) -> Any:
    config, plan, traces = planned(**changes)
    found = time_on_ranks(plan, traces, config, 2, rates())
    assert not isinstance(found, str), found
    return found, plan


def seconds(found: Any, what: str) -> float:
    return sum(end - begin for lane, _, name, begin, end in found.timeline if what in (lane, name))


def flops_of(changes: dict[str, Any]) -> float:
    """Of a forward, by hand: matrices twice, causal attention half of its scores."""
    config, plan, _ = planned(**changes)
    tokens, dim = 2 * 32, 64
    matrices = sum(
        p.numel for u in plan.units for b in u.layout.buckets for p in b.params
        if len(p.spec.shape) == 2 and "embedding" not in p.name
    )  # fmt: skip
    attention = config.model.layers * 2 * 2 * tokens * 32 * dim / 2
    return 2.0 * tokens * matrices + attention


def test_a_step_takes_what_its_products_take() -> None:
    found, plan = step()
    forward = PER_FLOP * flops_of({})
    attention = 3 * 2 * 2 * 64 * 32 * 64 / 2 * PER_FLOP
    assert seconds(found, "forward") == pytest.approx(forward, rel=1e-3)
    # Two products for each one of the forward, five for two in attention.
    backward = 2 * (forward - attention) + 2.5 * attention
    assert seconds(found, "backward") == pytest.approx(backward, rel=1e-3)
    again, _ = step(shard__activation_checkpointing="full")
    # All blocks once more but for the last product of each, whose result nobody asks for; the head
    # is in none.
    head, last = (2 * 64 * 64 * rows * PER_FLOP for rows in (97, 192))
    more = seconds(again, "backward") - backward
    assert more == pytest.approx(forward - head - 3 * last, rel=1e-3)
    state = PER_BYTE * sum(unit.layout.grad_bytes for unit in plan.units)
    assert seconds(found, "step") == pytest.approx(state, rel=1e-3)


def test_a_step_waits_for_what_a_rank_receives() -> None:
    """Nothing overlaps: two gathers and a reduction, or one gather."""
    found, plan = step(shard__strategy="full_shard")
    assert found.exposed_s == pytest.approx(RECEIVED * plan.received_bytes, rel=1e-3)
    kept, other = step(shard__strategy="shard_grad_op")
    assert kept.exposed_s == pytest.approx(RECEIVED * other.received_bytes, rel=1e-3)
    assert kept.exposed_s < found.exposed_s
    many, _ = step(shard__strategy="full_shard", train__global_batch=8)
    assert many.exposed_s == pytest.approx(2 * found.exposed_s, rel=1e-6)
    deferred, _ = step(shard__strategy="shard_optimizer", train__global_batch=8)
    once, _ = step(shard__strategy="shard_optimizer")
    assert deferred.exposed_s == pytest.approx(once.exposed_s, rel=1e-6)


def test_fewer_gradients_take_less() -> None:
    """Frozen weights have no product of their own in the backward, and no optimizer."""
    config, _, _ = planned()
    model = build_model(config, None)
    usual = ranks_step_time(*_traced(model), rates(), Stepping())
    for name, param in model.named_parameters():
        param.requires_grad_("blocks.2" in name)
    frozen = ranks_step_time(*_traced(model), rates(), Stepping())
    assert seconds(frozen, "forward") == pytest.approx(seconds(usual, "forward"))
    assert seconds(frozen, "backward") < seconds(usual, "backward") / 2
    assert seconds(frozen, "step") < seconds(usual, "step") / 2


def _traced(model: nn.Module) -> tuple[Any, Any]:
    config, plan, traces = planned(model)
    found, is_known = traces.of(plan, config)
    assert is_known
    return plan, found


def test_operators_that_move_nothing_or_little() -> None:
    watched = Watched()
    with FakeTensorMode(), watched:
        table, at = torch.empty(1000, 8), torch.zeros(4, dtype=torch.long)
        watched.take()
        rows = nn.functional.embedding(at, table)
        rows.view(-1).t()
        rows * rows.sum(0, keepdim=True).expand(4, 8)
        rows.mul_(2.0)
    assert watched.take() == Counter({
        Operator("elementwise", "float32", 2 * 4 * 8 * 4): 2,  # what is looked up; and in place
        Operator("view", "", 0): 3,
        Operator("elementwise", "float32", 4 * 8 * 4 + 8 * 4): 1,  # the sum
        Operator("elementwise", "float32", 2 * 4 * 8 * 4 + 8 * 4): 1,  # one row is read again
    })  # fmt: skip


def test_thin_products_wait_for_memory() -> None:
    found = rates(elementwise=PER_BYTE)
    thin, thick = (Operator("product", "float32", flops, 1000) for flops in (10.0, 1e6))
    assert found.seconds(thin) == pytest.approx(1000 * PER_BYTE)
    assert found.seconds(thick) == pytest.approx(1e6 * PER_FLOP)


def test_tables_are_read_off() -> None:
    table = {10.0: 2.0, 1000.0: 20.0}
    assert [read_off(table, x) for x in (1.0, 10.0, 1000.0, 5000.0)] == [2.0, 2.0, 20.0, 100.0]
    assert read_off(table, 100.0) == pytest.approx(40**0.5)


# -- the file --------------------------------------------------------------------------------------
DEVICE = '[device]\nkind = "cpu"\nname = "2 cores"\ncount = 1\nmemory = 8000000000\n'


def written(path: Path, *, ranks: int = 2, without: str = "", seconds: str = "1e-5") -> Path:
    lines = [DEVICE, f"[compute]\nranks = {ranks}\nthreads = 1\ncall = 1e-6\n"]
    for kind in ("product", "attention", "attention backward", "elementwise", "adamw"):
        if kind != without:
            lines.append(f'[[operator]]\nkind = "{kind}"\ndtype = "float32"\namount = 1000')
            lines.append(f"seconds = {seconds}\n")
    for kind in ("gather", "reduce", "all_reduce"):
        if kind != without:
            lines.append(f'[[collective]]\ntransport = "shared_memory"\nkind = "{kind}"')
            lines.append(f"ranks = {ranks}\nbytes = 1000\nseconds = 1e-5\n")
    path.write_text("\n".join(lines))
    return path


def test_a_file_gives_a_plan_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "two.toml")
    read = read_rates(file)
    assert read is not None and read.collectives["shared_memory", "gather"] == {500.0: 1e-5}
    assert read.collectives["shared_memory", "all_reduce"] == {1000.0: 1e-5}

    def rows(*arguments: str) -> tuple[list[dict[str, Any]], list[str]]:
        assert main(["plan", *arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["rows"], found["notes"]

    job = ("--model.dim=64", "--model.layers=2", "--hardware", str(file))
    known, notes = rows(*job)
    assert all(row["step_s"] > row["exposed_s"] > 0 for row in known)
    assert notes[-1].startswith("times: by what 2 ranks of 1 thread side by side reached")
    for others in (
        (*job, "--gpus", "4", "--train.global_batch=32"),
        (*job, "--shard.transport=c10d"),
        (*job, "--optim.kind=muon"),
        ("--params", "1e6", "--hardware", str(file)),
    ):
        unknown, notes = rows(*others)
        assert all(row["step_s"] is None for row in unknown)
        assert notes[-1].startswith("no time: "), others
    old = tmp_path / "old.toml"
    old.write_text(DEVICE)
    assert read_rates(old) is None
    assert all(row["step_s"] is None for row in rows(*job[:2], "--hardware", str(old))[0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"without": "adamw"}, "has no [[operator]] of kind adamw"),
        ({"seconds": "0"}, "expected a number above 0, found 0"),
        ({"seconds": '"fast"'}, "expected a number above 0, found 'fast'"),
    ],
)
def test_broken_files(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "broken.toml", **changes)
    assert main(["plan", "--model.dim=64", "--hardware", str(file)]) == 2
    error = capsys.readouterr().err
    assert said in error and "shardwise doctor --save" in error and error.count("\n") == 1
