"""What one step communicates: bytes that a rank receives, by the least that a collective needs.

    gather       the others' parts                       (W-1)/W of the whole
    reduce       the others' contributions to its part   (W-1)/W of the whole
    all_reduce   a reduce and a gather                   2 (W-1)/W of the whole
    broadcast, reduce to one, all_to_all                 (W-1)/W of the tensor (a mean)

Ours are read from the engine's events and layouts: the shared-memory transport issues no
collectives. The others' are counted by a dispatch mode, which sees every collective of c10d, those
of C++ reducers included. Small messages through the store are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch_compat import DispatchMode
from shardwise.comm.transport import Bucket
from shardwise.engine.core.state import units_in
from shardwise.engine.services.inspect import record_events
from shardwise.layout import BucketLayout, Collective, Moment, home_reduce
from shardwise.layout.unit import all_reduce_of, gather_of, reduce_of
from shardwise.layout.wire import PLAIN


@dataclass(slots=True)
class Traffic:
    """Bytes that a rank receives in one step, and how many collectives bring them."""

    gather_bytes: int = 0
    reduce_bytes: int = 0
    other_bytes: int = 0
    num_gathers: int = 0
    num_reduces: int = 0
    num_others: int = 0

    @property
    def total_bytes(self) -> int:
        return self.gather_bytes + self.reduce_bytes + self.other_bytes

    def add(self, kind: str, size_bytes: float) -> None:
        setattr(self, f"{kind}_bytes", getattr(self, f"{kind}_bytes") + round(size_bytes))
        name = f"num_{kind}s"
        setattr(self, name, getattr(self, name) + 1)

    def add_all(self, moved: list[Collective], ranks: int) -> None:
        """Collectives of a layout over an axis of so many ranks."""
        for each in moved:
            kind = "other" if each.kind == "all_reduce" else each.kind
            self.add(kind, each.received_bytes(ranks))

    def as_json(self) -> dict[str, int]:
        return {"total_bytes": self.total_bytes, **asdict(self)}


def count_ours(model: nn.Module, step: Callable[[], object]) -> Traffic:
    """One step of a sharded model of ours."""
    with record_events(model) as log:
        step()
    units = {unit.name: unit for unit in units_in(model)}
    traffic = Traffic()
    for event in log.codes("AG", "HG", "RS"):
        for grads in units[event.unit].gradients.buckets:
            bucket = grads.state
            layout, reduce = bucket.layout, grads.trainable_layout()
            home, replicas = bucket.home, layout.replicas
            if event.code == "AG" and layout.world > 1:
                moved = gather_of(_as_gathered(layout, bucket.bucket), Moment.FORWARD)
            elif event.code == "RS" and reduce.indices and layout.world > 1:
                moved = reduce_of(reduce)
            else:
                moved = []
            traffic.add_all(moved, layout.world)
            if event.code == "HG" and home is not None:
                again = gather_of(_as_gathered(home.layout, home.bucket), Moment.FORWARD)
                traffic.add_all(again, replicas)
            if event.code == "RS" and reduce.indices and home is not None:
                traffic.add_all(reduce_of(home_reduce(home.layout, reduce)), replicas)
            elif event.code == "RS" and reduce.indices and replicas > 1:
                traffic.add_all(all_reduce_of(reduce), replicas)
    return traffic


def _as_gathered(layout: BucketLayout, bucket: Bucket | None) -> BucketLayout:
    """What is frozen keeps its bits, whatever wire format its bucket has."""
    keeps = bucket is not None and bucket.keeps_bits
    return replace(layout, wire=PLAIN) if keeps else layout


def count_collectives(step: Callable[[], object]) -> Traffic:
    """One step of anything that communicates through c10d."""
    counter = _Counter()
    with counter:
        step()
    return counter.traffic


class _Counter(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func.name()).partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        sizes = [_bytes(argument) for argument in args]
        world = dist.get_world_size()
        share = (world - 1) / world
        if "allgather" in name or "all_gather" in name:
            parts = sizes[0] if name.startswith("all_gather") else min(sizes[:2])
            self.traffic.add("gather", parts * (world - 1))
        elif "reduce_scatter" in name:
            self.traffic.add("reduce", max(sizes[:2]) * share)
        elif "allreduce" in name or "all_reduce" in name:
            self.traffic.add("other", 2 * sizes[0] * share)
        elif any(word in name for word in ("broadcast", "reduce", "alltoall", "all_to_all")):
            self.traffic.add("other", max(sizes[:2]) * share)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0
