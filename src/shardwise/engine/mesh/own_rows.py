"""Placements that keep something whole, for `shard_placement_fn`.

    BlockRows(dim, block)   cuts at multiples of `block` rows
    WholeOn(owner, dim)     all rows on one rank
    whole_blocks(256)       BlockRows for every parameter, so that no block of 256 elements is split
    whole_matrices(model)   WholeOn for every matrix, the owners chosen by work and bytes

Quantised state has a scale for each block of elements; a matrix optimizer (Muon, Shampoo) needs
each matrix. What they cost: ranks hold unequal parts, which travel rank by rank (a broadcast each)
instead of in one all-gather. Where that is too slow `OwnedOptimizer` leaves even cuts as they are
and brings each matrix to its owner for the step alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch.nn as nn

from shardwise.engine.mesh.rows import RowShard
from shardwise.layout import Cuts


class BlockRows(RowShard):
    """Even cuts, moved to multiples of `block` rows; the last ranks may have less, or nothing.
    A part of fewer than `least` rows joins the one before it.
    """

    def __init__(self, dim: int, block: int, least: int = 1) -> None:
        super().__init__(dim)
        for name, given in (("block", block), ("least", least)):
            if given < 1:
                raise ValueError(f"{name}: at least 1 row, found {given}")
        self.block, self.least = block, least

    def cuts(self, rows: int, world: int) -> Cuts:
        bounds = list(Cuts.block(rows, world, -(-self.least // self.block) * self.block).bounds)
        last = max((b for b in bounds if b < rows), default=0)
        if rows - last < self.least:
            bounds = [rows if b == last and b else b for b in bounds]
        return Cuts(tuple(bounds))


class WholeOn(RowShard):
    """All of a tensor on rank `owner` of the shard axis, nothing on the others."""

    def __init__(self, owner: int, dim: int = 0) -> None:
        super().__init__(dim)
        if owner < 0:
            raise ValueError(f"owner: a rank of the shard axis, found {owner}")
        self.owner = owner

    def cuts(self, rows: int, world: int) -> Cuts:
        return Cuts.whole(rows, world, self.owner)


def whole_blocks(
    elements: int, *, least: int | None = None
) -> Callable[[nn.Parameter], RowShard | None]:
    """A `shard_placement_fn` under which each rank's part of a parameter, flattened, begins at a
    multiple of `elements`: blocks that a quantised optimizer makes of parts are those of the whole.

    Args:
        elements: of a block.
        least: parts have so many elements or none, and a parameter that is no whole number of
            blocks is on one rank; one with fewer elements is cut evenly. For optimizers that keep
            small tensors, and those with a part of a block, in full precision: what they do with
            a part is what they would do with the whole (torchao.optim: 4096).
    """
    for name, given in (("elements", elements), ("least", least)):
        if given is not None and given < 1:
            raise ValueError(f"{name}: at least 1, found {given}")

    def place(param: nn.Parameter) -> RowShard | None:
        if not param.ndim:
            return None
        row = math.prod(param.shape[1:])
        block = elements // math.gcd(elements, row) if row else 1
        rows = 1
        if least and row:
            if param.numel() < least:
                return None
            rows = -(-least // row)
            if param.numel() % elements:
                block = rows = param.shape[0]
        return None if block == rows == 1 else BlockRows(0, block, rows)

    return place


def whole_matrices(
    modules: Iterable[nn.Module] | nn.Module, world: int
) -> Callable[[nn.Parameter], RowShard | None]:
    """A `shard_placement_fn` that gives each matrix (2 dims) of these modules to one rank; others
    are cut as usual. `world`: ranks of the shard axis. Call it once for the whole model, so that
    owners are spread over all units.
    """
    listed = [modules] if isinstance(modules, nn.Module) else list(modules)
    known = dict.fromkeys(p for m in listed for p in m.parameters() if p.ndim == 2)
    owners = share_out([tuple(p.shape) for p in known], world)
    by_id = {id(param): owner for param, owner in zip(known, owners, strict=True)}

    def place(param: nn.Parameter) -> RowShard | None:
        owner = by_id.get(id(param))
        return None if owner is None else WholeOn(owner)

    place.keeps = known  # type: ignore[attr-defined]  # ids are theirs while this lives
    return place


def work_of(shape: Sequence[int]) -> int:
    """Of a step, up to a factor: products of a matrix with itself take rows * columns * the smaller
    of the two. Matrices of a stack count one by one.
    """
    return math.prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1)


def share_out(
    shapes: Sequence[Sequence[int]], ranks: int, load: Sequence[tuple[int, int]] = ()
) -> list[int]:
    """An owner for each shape: the most work first, to the rank that has least of it, then the
    fewest elements. `load`: (work, elements) that ranks have already. The same on all ranks.
    """
    if ranks < 1:
        raise ValueError(f"ranks: at least 1, found {ranks}")
    has = [list(pair) for pair in (load or [(0, 0)] * ranks)]
    owners = [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda i: (-work_of(shapes[i]), i)):
        owner = min(range(ranks), key=lambda rank: (has[rank][0], has[rank][1], rank))
        owners[index] = owner
        has[owner][0] += work_of(shapes[index])
        has[owner][1] += math.prod(shapes[index])
    return owners
