"""What runs beside what on an accelerator: the calls to `Streams`, as golden text.

    mark                 the gather lane waits for what the compute stream has queued
    fork, join gather    the gather and its copy-out are queued on the gather lane
    fork, join reduce    the reduce lane waits for what the compute stream has queued
    event, wait gather   a point behind them; the compute stream waits for it
    run L0, back L0      the user's computing is queued
    land                 the host waits for copies to the host, if there are any

A gather overlaps with what is queued between its `event` and the `wait` for it. No clock, no GPU:
the engine makes the same calls to `DeviceStreams`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from engine_kit import Mlp, Setting, batch, loss_of, make

import shardwise as sw
from ranks import on_ranks
from shardwise.comm.streams import NoStreams
from shardwise.engine.core.state import units_in


class RecordingStreams:
    """Writes down what would be ordered: `fork gather`, `join gather`, `event gather`, `wait
    gather`, `mark`.
    """

    is_async = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        self.calls.append(f"fork {name}")
        yield
        self.calls.append(f"join {name}")

    def record(self, name: str) -> Any:
        self.calls.append(f"event {name}")
        return name

    def wait(self, event: Any) -> None:
        self.calls.append(f"wait {event}")

    def mark(self) -> None:
        self.calls.append("mark")

    def to_host(self, tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        self.calls.append("copy to host")
        return tensor

    def land(self) -> None:
        self.calls.append("land")

    def reach(self, event: Any) -> None:
        self.calls.append(f"reach {event}")


def recorded(model: Any) -> RecordingStreams:
    """The streams of all units, with the computing of the layers noted between their calls."""
    streams = RecordingStreams()

    def watch(x: torch.Tensor, text: str) -> None:
        if x.requires_grad:
            x.register_hook(lambda _: streams.calls.append(text))

    for unit in units_in(model):
        assert isinstance(unit.streams, NoStreams)
        unit.streams = unit.copy.streams = streams
        for bucket in unit.buckets:
            bucket.streams = streams
    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, i=i: streams.calls.append(f"run L{i}"))
        layer.register_forward_pre_hook(lambda _, args, i=i: watch(args[0], f"back L{i}"))
    return streams


GATHER = "fork gather | join gather | event gather"
AHEAD_FORWARD = (
    f"mark | {GATHER} | wait gather | {GATHER} | "  # R, then L0 ahead
    f"wait gather | {GATHER} | run L0 | mark | "  # L1 is under way while L0 runs; L0 is released
    f"wait gather | {GATHER} | run L1 | mark | "
    "wait gather | run L2 | mark | mark"
)
ALONE_FORWARD = (
    f"mark | {GATHER} | wait gather | {GATHER} | wait gather | run L0 | mark | "
    f"{GATHER} | wait gather | run L1 | mark | {GATHER} | wait gather | run L2 | mark | mark"
)


def step(model: Any, streams: RecordingStreams, rank: int, number: int) -> tuple[str, str]:
    streams.calls.clear()
    loss = loss_of(model(batch(model, number, rank)))
    forward = " | ".join(streams.calls)
    streams.calls.clear()
    loss.backward()
    return forward, " | ".join(streams.calls)


@on_ranks(2)
def test_gathers_overlap_with_the_unit_before(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Mlp), world)
    streams = recorded(model)
    sw.set_prefetch(model, True)
    assert step(model, streams, rank, 0)[0] == ALONE_FORWARD  # the order is not known yet
    forward, backward = step(model, streams, rank, 1)
    assert forward == AHEAD_FORWARD
    issue = "fork reduce | join reduce"
    finish = f"{issue} | event reduce | wait reduce"
    # The gather of the unit before is issued ahead of each reduction.
    assert backward == (
        f"{GATHER} | wait gather | {GATHER} | {issue} | mark | "  # R, L2 ahead, R reduced
        f"wait gather | {GATHER} | {finish} | {issue} | mark | back L2 | "  # L1 ahead of computing
        f"wait gather | {GATHER} | {finish} | {issue} | mark | back L1 | "  # one is in flight
        f"wait gather | {finish} | {issue} | {finish} | land | mark"
    )


@on_ranks(2)
def test_more_reductions_in_flight(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Mlp), world)
    model.set_reduce_scatter_max_input_buffers(3)
    streams = recorded(model)
    sw.set_prefetch(model, True)
    loss_of(model(batch(model, 0, rank))).backward()
    issue = "fork reduce | join reduce"
    finish = f"{issue} | event reduce | wait reduce"
    calls = " | ".join(call for call in streams.calls if call.endswith("reduce"))
    assert calls == " | ".join([issue] * 3 + [finish, issue] + [finish] * 3)


@on_ranks(2)
def test_without_prefetching_nothing_overlaps(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Mlp), world)
    streams = recorded(model)
    for number in range(2):
        assert step(model, streams, rank, number)[0] == ALONE_FORWARD
