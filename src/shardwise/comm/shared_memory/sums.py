"""Sums over ranks, in rank order, in tiles that stay in the cache.

    sum = ((p0 + p1) + p2) + ...      the same order, whoever owns the part and whoever came first

The own part is where the result goes. Adding is commutative bit for bit, so the sum of what stands
left of it may be added to it from the right. One tile is read, summed and scaled before the next is
touched: memory sees each element once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

TILE_BYTES = 1 << 20


def sum_of_ranks(
    out: torch.Tensor, rank: int, peers: dict[int, torch.Tensor], scale: float = 1.0
) -> None:
    """Add the peers' parts, by rank, to this rank's in `out`, in the order of the ranks. Narrower
    parts are widened exactly.
    """
    before = [part for r, part in peers.items() if r < rank]
    after = [part for r, part in peers.items() if r > rank]
    if not out.numel():
        return
    tile = max(1, TILE_BYTES // out.itemsize)
    scratch = out.new_empty(min(tile, out.numel())) if len(before) > 1 else out
    rows: Iterable[tuple[torch.Tensor, ...]] = [(out, *before, *after)]
    if out.numel() > tile:
        rows = zip(*(part.split(tile) for part in (out, *before, *after)), strict=True)
    num_before = len(before)
    for total, *parts in rows:
        if num_before > 1:
            left = scratch[: total.numel()]
            left.copy_(parts[0])
            for part in parts[1:num_before]:
                left.add_(part)
            total.add_(left)
            parts = parts[num_before:]
        for part in parts:
            total.add_(part)
        if scale != 1.0:
            total.mul_(scale)
