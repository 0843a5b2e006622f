"""What a rank sends in a step, by what its layouts or its collectives say, and what that is on a
cable: the headers of its segments, and the acknowledgements of what comes back.

    all_gather   a ring: to the rank behind it, W - 1 parts
    all_reduce   a ring the other way round: 2 (W - 1) parts of 1/W
    all_to_all   to each rank its own part

That is what Gloo does. A reduce-scatter is an all-reduce there (it has no other); ours in a wire
format is an all-to-all. Between ranks of one host nothing is on the cable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

import shardwise.layout as sharding
from shardwise._torch_compat import DispatchMode
from shardwise.engine.core.state import units_in
from shardwise.engine.services.inspect import record_events
from shardwise.layout.unit import Moment, all_reduce_of, gather_of, reduce_of
from testbed import MTU

ETHERNET_BYTES, IP_BYTES, TCP_BYTES = 14, 20, 32  # TCP's with time stamps
HEADER_BYTES = ETHERNET_BYTES + IP_BYTES + TCP_BYTES
SEGMENT_BYTES = MTU - IP_BYTES - TCP_BYTES
# The kernel joins segments that arrive together, and acknowledges a block of up to 64 KiB at once.
BLOCK_BYTES = 65536 // SEGMENT_BYTES * SEGMENT_BYTES

Kind = Literal["all_gather", "all_reduce", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One that a rank takes part in; `whole_bytes`: what all ranks have in the end (all_gather), or
    what each puts in.
    """

    kind: Kind
    ranks: tuple[int, ...]
    whole_bytes: int


def sent_by(rank: int, collective: Collective) -> dict[int, float]:
    """Whom a rank sends to, and how many bytes."""
    ranks, world = collective.ranks, len(collective.ranks)
    me, part = ranks.index(rank), collective.whole_bytes / world
    if collective.kind == "all_to_all":
        return {other: part for other in ranks if other != rank}
    if collective.kind == "all_gather":
        return {ranks[(me + 1) % world]: part * (world - 1)}
    return {ranks[(me - 1) % world]: 2 * part * (world - 1)}


def sent_across(rank: int, collectives: list[Collective], ranks_per_host: int) -> float:
    """Bytes that a rank sends to ranks of the other host."""
    return sum(
        size_bytes
        for collective in collectives
        for to, size_bytes in sent_by(rank, collective).items()
        if to // ranks_per_host != rank // ranks_per_host
    )


def on_cable(out_bytes: float, in_bytes: float) -> float:
    """What one end of the cable sends of a payload in each direction."""
    segments, blocks = out_bytes / SEGMENT_BYTES, in_bytes / BLOCK_BYTES
    return out_bytes + HEADER_BYTES * (segments + blocks)


def by_layout(model: nn.Module, step: Callable[[], object]) -> list[Collective]:
    """What a step of a sharded model of ours moves over process groups."""
    with record_events(model) as log:
        step()
    units = {unit.name: unit for unit in units_in(model)}
    found = []
    for event in log.codes("AG", "RS"):
        for grads in units[event.unit].gradients.buckets:
            layout, (shard, replicate) = grads.state.layout, grads.state.mesh.axes
            reduce = grads.trainable_layout()
            if event.code == "AG":
                found += [_issued(c, layout, shard) for c in gather_of(layout, Moment.FORWARD)]
            elif reduce.indices:
                found += [_issued(c, layout, shard) for c in reduce_of(reduce)]
                found += [_issued(c, layout, replicate) for c in all_reduce_of(reduce)]
    return [collective for collective in found if len(collective.ranks) > 1]


def _issued(planned: sharding.Collective, layout: sharding.BucketLayout, axis: Any) -> Collective:
    """How c10d moves it, on this rank."""
    ranks, wire = axis.ranks, getattr(layout.wire, planned.axis)
    if planned.ranks:  # inside hosts, or between them
        inside = wire.host_ranks
        host, number = divmod(axis.rank, inside)
        within = ranks[host * inside : (host + 1) * inside]
        ranks = within if planned.is_inside else ranks[number::inside]
    if planned.kind == "gather":
        return Collective("all_gather", ranks, planned.size_bytes * len(ranks))
    is_direct = wire.host_ranks or wire.reduce.is_lossy
    kind: Kind = "all_to_all" if planned.kind == "reduce" and is_direct else "all_reduce"
    return Collective(kind, ranks, planned.size_bytes)


def by_collectives(step: Callable[[], object]) -> list[Collective]:
    """What a step of anything moves over process groups."""
    recorder = _Recorder()
    with recorder:
        step()
    return [collective for collective in recorder.found if len(collective.ranks) > 1]


class _Recorder(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func.name()).partition("::")
        if namespace == "c10d":
            sizes, ranks = [_bytes(argument) for argument in args], _ranks(args)
            if "allgather" in name:
                self.found.append(Collective("all_gather", ranks, max(sizes[:2])))
            elif "allreduce" in name or "reduce_scatter" in name:
                self.found.append(Collective("all_reduce", ranks, max(sizes[:2])))
        return func(*args, **(kwargs or {}))


def _ranks(args: Any) -> tuple[int, ...]:
    for argument in args:
        if type(argument).__name__ == "ScriptObject" and "ProcessGroup" in str(argument._type()):
            group = dist.ProcessGroup.unbox(argument)
            return tuple(dist.get_process_group_ranks(group))
    return tuple(range(dist.get_world_size()))


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0
