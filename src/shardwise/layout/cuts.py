"""Where a tensor is cut among the ranks of the shard axis.

A tensor is seen as `(outer, rows, inner)`: `rows` is the dim that is cut, `outer` the product of
the dims before it and `inner` of those behind it. The cut itself is a list of boundaries `0 = b0 <=
b1 <= ... <= bN = rows`; rank r owns rows `[b_r, b_r+1)`. Three makers cover what the engine needs:

    even    torch.chunk's and DTensor's cut: ceil(rows / N) each, the last may get less or nothing
    block   boundaries at multiples of a block, so that quantization blocks stay whole
    whole   all rows on one rank, for optimizers that need whole matrices (Muon, Shampoo)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Cuts:
    """Boundaries of one tensor's rows; `bounds` has one entry more than there are ranks."""

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0:
            raise ValueError(f"cuts start at 0 and serve one rank at least, found {self.bounds}")
        if any(a > b for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            raise ValueError(f"cuts must not go back, found {self.bounds}")

    @classmethod
    def even(cls, rows: int, world: int) -> Cuts:
        """`torch.chunk`'s cut, which is also DTensor's."""
        return cls.block(rows, world, 1)

    @classmethod
    def block(cls, rows: int, world: int, block: int) -> Cuts:
        """Like `even`, with every inner boundary at a multiple of `block` rows."""
        _check(rows, world)
        if block < 1:
            raise ValueError(f"a block has one row at least, found {block}")
        blocks = -(-rows // block)
        chunk = -(-blocks // world) * block
        return cls(tuple(min(rank * chunk, rows) for rank in range(world + 1)))

    @classmethod
    def whole(cls, rows: int, world: int, owner: int) -> Cuts:
        """All rows on rank `owner`."""
        _check(rows, world)
        if not 0 <= owner < world:
            raise ValueError(f"owner must be a rank in [0, {world}), found {owner}")
        return cls(tuple(0 if rank <= owner else rows for rank in range(world + 1)))

    @property
    def world(self) -> int:
        return len(self.bounds) - 1

    @property
    def rows(self) -> int:
        return self.bounds[-1]

    @property
    def is_exact(self) -> bool:
        """True when every rank owns equally many rows: one strided copy moves all parts."""
        return _is_exact(self.bounds)

    @property
    def is_even(self) -> bool:
        """True for DTensor's cut, so that a plain `Shard(dim)` placement describes it."""
        return self == Cuts.even(self.rows, self.world)

    def start(self, rank: int) -> int:
        return self.bounds[rank]

    def stop(self, rank: int) -> int:
        return self.bounds[rank + 1]

    def size(self, rank: int) -> int:
        """Rows that `rank` owns."""
        return self.bounds[rank + 1] - self.bounds[rank]


@lru_cache(4096)
def _is_exact(bounds: tuple[int, ...]) -> bool:
    """Asked for every parameter of every layer, often with a thousand ranks."""
    first = bounds[1]
    return all(b == rank * first for rank, b in enumerate(bounds))


def _check(rows: int, world: int) -> None:
    if rows < 0:
        raise ValueError(f"rows cannot be negative, found {rows}")
    if world < 1:
        raise ValueError(f"a shard axis has one rank at least, found {world}")
