"""What a rank sends in a step, by what its layouts or its collectives say, and what that is on a
cable: the headers of its segments, and the acknowledgements of what comes back.

Gloo moves an all-gather as a ring: each rank sends W - 1 parts to the rank behind it. An all-reduce
is a ring too, the other way round: 2 (W - 1) parts of 1/W. A reduce-scatter is an all-reduce (Gloo
has no other). Of two neighbours on one host nothing is on the cable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch_compat import DispatchMode
from shardwise.engine.core.state import units_in
from shardwise.engine.services.inspect import record_events
from testbed import MTU

ETHERNET_BYTES, IP_BYTES, TCP_BYTES = 14, 20, 32  # TCP's with time stamps
HEADER_BYTES = ETHERNET_BYTES + IP_BYTES + TCP_BYTES
SEGMENT_BYTES = MTU - IP_BYTES - TCP_BYTES
# The kernel joins segments that arrive together, and acknowledges a block of up to 64 KiB at once.
BLOCK_BYTES = 65536 // SEGMENT_BYTES * SEGMENT_BYTES

Kind = Literal["all_gather", "all_reduce"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One that a rank takes part in; `whole_bytes`: what all ranks have in the end."""

    kind: Kind
    ranks: tuple[int, ...]
    whole_bytes: int


def sent_by(rank: int, collective: Collective) -> tuple[int, float]:
    """Whom a rank sends to, and how many bytes."""
    ranks, world = collective.ranks, len(collective.ranks)
    me, part = ranks.index(rank), collective.whole_bytes / world
    if collective.kind == "all_gather":
        return ranks[(me + 1) % world], part * (world - 1)
    return ranks[(me - 1) % world], 2 * part * (world - 1)


def sent_across(rank: int, collectives: list[Collective], ranks_per_host: int) -> float:
    """Bytes that a rank sends to ranks of the other host."""
    total = 0.0
    for collective in collectives:
        to, size_bytes = sent_by(rank, collective)
        if to // ranks_per_host != rank // ranks_per_host:
            total += size_bytes
    return total


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
            bucket, layout = grads.state, grads.state.layout
            shard, replicate = bucket.mesh.axes
            reduce = grads.trainable_layout()
            if event.code == "AG":
                whole = layout.chunk_numel * layout.world * layout.gather_dtype.itemsize
                found.append(Collective("all_gather", shard.ranks, whole))
            elif reduce.indices:
                whole = reduce.packed_numel * reduce.dtype.itemsize
                found.append(Collective("all_reduce", shard.ranks, whole))
                found.append(Collective("all_reduce", replicate.ranks, reduce.chunk_bytes))
    return [collective for collective in found if len(collective.ranks) > 1]


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
