"""The order of work on an accelerator: nothing races, and no ordering call is there in vain.

One process on torch's fake group of 4 ranks (its collectives move nothing, which the detector does
not mind). Twelve configurations run without a race. Then each call that orders work is left out in
turn, everywhere: the detector has to notice.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from race_detector import Detector, LaneBlocks, Lanes, Operators, transport_class
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from ranks import spawn_ranks
from shardwise.comm import streams
from shardwise.comm.blocks import Blocks
from shardwise.comm.c10d import transport
from shardwise.comm.kept import kept

WIDTH = 40


class Stack(nn.Sequential):
    """Blocks of which the last may be left out."""

    num_run = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self)[: self.num_run]:
            x = block(x)
        return x


def stack(width: int = WIDTH) -> Stack:
    torch.manual_seed(0)
    return Stack(
        *(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )
    )


def train(mesh: DeviceMesh, *, num_micro: int = 1, width: int = WIDTH, **options: Any) -> None:
    """Three steps with clipping, and prefetch as on an accelerator."""
    model: Any = stack(width)
    for block in model:
        sw.fully_shard(block, mesh=mesh, transport="c10d", **options)
    sw.fully_shard(model, mesh=mesh, transport="c10d", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        for micro in range(num_micro):
            is_last = micro == num_micro - 1
            model.set_requires_gradient_sync(is_last)
            model.num_run = 3 if is_last and num_micro > 1 else 4  # one has sums only
            model(torch.randn(4, width)).square().mean().backward()
        sw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def drop(mesh: DeviceMesh, **options: Any) -> None:
    """A model goes while its gather is under way, and something else takes its memory."""
    for _ in range(2):
        model: Any = sw.fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh, transport="c10d", **options)
        handle = model.unshard(async_op=True)
        del model, handle
        torch.randn(WIDTH, WIDTH)


def configurations() -> dict[str, Callable[[], None]]:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    half = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run = functools.partial
    return {
        "full_shard": run(train, line),
        "large": run(train, line, width=300),
        "uneven": run(train, line, width=37),
        "accumulation": run(train, line, num_micro=3),
        "large accumulation": run(train, line, num_micro=2, width=300),
        "bf16": run(train, line, mp_policy=half),
        "hybrid_shard": run(train, grid, strategy="hybrid_shard"),
        "hybrid_full_optimizer": run(train, grid, strategy="hybrid_full_optimizer"),
        "shard_grad_op": run(train, line, strategy="shard_grad_op"),
        "no_shard": run(train, line, strategy="no_shard"),
        "a model that goes": run(drop, line),
        "a model that goes, bf16": run(drop, line, mp_policy=half),
    }


def races_of(left_out: frozenset[str] = frozenset()) -> tuple[dict[str, list[str]], set[str]]:
    """Run configurations on fresh streams, a mutant's until one races: the races of each, and what
    was called.
    """
    detector = Detector()
    operators, lanes = Operators(detector), Lanes(detector)
    lanes.left_out |= left_out
    blocks = LaneBlocks(detector)
    found: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(streams.MAKERS, "cpu", lambda device: lanes)
        patch.setattr(Blocks, "of_process", classmethod(lambda cls: blocks))
        lanes_class = transport_class(detector, operators, set(left_out))
        patch.setattr(transport, "C10dTransport", lanes_class)
        streams.streams_for.cache_clear()
        kept("transports").clear()
        with operators:
            for name, run in configurations().items():
                before = detector.num_launches
                run()
                found[name] = list(detector.races)
                assert detector.num_launches > before + 5, "the detector saw nothing"
                detector.races.clear()
                if left_out and found[name]:
                    break
    streams.streams_for.cache_clear()
    return found, lanes.seen


def examine(rank: int, world: int) -> dict[str, Any]:
    """In a process of its own, because torch's fake group is its default group."""
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    races, calls = races_of()
    calls |= {"work of gather", "work of reduce", "work of all_reduce"}
    mutants = {call: any(races_of(frozenset({call}))[0].values()) for call in sorted(calls)}
    return {"races": races, "mutants": mutants}


@pytest.fixture(scope="module")
def examined() -> dict[str, Any]:
    with spawn_ranks(1, examine, backend=None) as group:
        (outcome,) = group.join(timeout_s=110)
    assert outcome.kind == "ok", outcome.text
    return outcome.value


def test_nothing_races(examined: dict[str, Any]) -> None:
    assert {name: races[:3] for name, races in examined["races"].items() if races} == {}


def test_each_ordering_call_is_needed(examined: dict[str, Any]) -> None:
    unnoticed = [call for call, is_noticed in examined["mutants"].items() if not is_noticed]
    assert unnoticed == []
    assert len(examined["mutants"]) >= 8
