"""Routes: how the gradients of a unit get from autograd's accumulators into a reduction, and what
their sum is divided by.

A unit has one route. The usual one puts a gradient into the reduction that its bucket collects, or
adds it to a partial sum where the backward does not sync. Who needs another (ranks without data,
sums in a fixed order) gives the unit a subclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from shardwise.comm.transport import Missing

if TYPE_CHECKING:
    from shardwise.engine.core.bucket import BucketState
    from shardwise.engine.core.gradients import BucketGrads, Reduction
    from shardwise.engine.core.unit_gradients import UnitGradients


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors around the sum. `before` is not 1 only for float16, whose sums overflow (FSDP2 does
    the same).
    """

    before: float
    after: float


@lru_cache
def mean_scale(world: int, dtype: torch.dtype, divide_by: float | None = None) -> Scale:
    """Factors that make a mean over `world` ranks, or a division by `divide_by`."""
    factor = float(world) if divide_by is None else float(divide_by)
    if dtype != torch.float16:
        return Scale(1.0, 1.0 / factor)
    before = 1.0
    while factor % (before * 2) == 0 and before * 2 <= factor / (before * 2):
        before *= 2
    return Scale(1.0 / before, before / factor)


class Weight:
    """What sums over ranks are divided by: in this order the factor that the user gave a unit, the
    count of this accumulation, the number of ranks. Decided before the first reduction.

    Attributes:
        is_counted: losses are sums, so that gradients are divided by a count (tokens).
        count: that of all ranks and micro-batches, where the backward reduces.
    """

    __slots__ = ("count", "is_counted")

    def __init__(self) -> None:
        self.is_counted = False
        self.count: float | None = None

    def scale(self, unit: UnitGradients, bucket: BucketState) -> Scale:
        mesh = bucket.mesh
        world = mesh.shard.size * mesh.replicate.size
        return mean_scale(world, bucket.layout.reduce_dtype, unit.divide_by or self.count)


class Route:
    """The usual one, which all units share."""

    is_usual = True  # small gradients may be put into a reduction all at once
    counts = True  # this rank's gradients are part of the sum
    refuses_counts = ""  # why gradients cannot be divided by a count, if they cannot

    def take(self, unit: UnitGradients, grads: BucketGrads, index: int, grad: torch.Tensor) -> None:
        """A full gradient has arrived."""
        if not unit.requires_sync:
            self.accumulate(unit, grads, index, grad)
            return
        if grads.buffer is None:
            grads.open(unit.context.weight.scale(unit, grads.state))
        self.put(unit, grads, index, grad)

    def put(self, unit: UnitGradients, grads: BucketGrads, index: int, grad: torch.Tensor) -> None:
        """A full gradient is to go into the reduction that is open."""
        grads.put(index, grad)

    def accumulate(
        self, unit: UnitGradients, grads: BucketGrads, index: int, grad: torch.Tensor
    ) -> None:
        """A full gradient is to be added up on this rank."""
        grads.accumulate(index, grad)

    def issue(self, unit: UnitGradients, grads: BucketGrads, *, joins: Missing | None) -> Reduction:
        """Reduce what a bucket has collected; `joins`: peers have some, this rank has nothing."""
        scale = unit.context.weight.scale(unit, grads.state)
        return grads.issue(scale, unit.requires_all_reduce, joins=joins)

    def holds_sums(self, unit: UnitGradients) -> bool:
        """Whether the route itself keeps sums of a unit that the end of this backward reduces."""
        return False

    def failed(self) -> None:
        """What was collected is incomplete, after an exception or with a new layout; the usual
        route keeps nothing.
        """


USUAL = Route()
