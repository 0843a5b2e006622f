"""What sums over ranks are divided by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from shardwise.engine.mesh.axes import ShardMesh


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
    """Of a context: in this order the factor that the user gave a unit, the count of this
    accumulation, the number of ranks. Decided before the first reduction.

    Attributes:
        is_counted: losses are sums, so that gradients are divided by a count (tokens).
        count: that of all ranks and micro-batches, where the backward reduces.
    """

    __slots__ = ("count", "is_counted")

    def __init__(self) -> None:
        self.is_counted = False
        self.count: float | None = None

    def scale(self, mesh: ShardMesh, dtype: torch.dtype, divide_by: float | None) -> Scale:
        """For a sum over `mesh` in `dtype`; `divide_by`: the user's factor."""
        return mean_scale(mesh.shard.size * mesh.replicate.size, dtype, divide_by or self.count)
