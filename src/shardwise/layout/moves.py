"""Moves: the strided copies between a rank-major buffer and whole parameters.

    rank-major   | w1[0] ..pad | b[0] ..pad | w1[1] ..pad | b[1] ..pad | ...     collectives
                   '---- chunk of rank 0 ---' '---- chunk of rank 1 ---'
    whole        | w1[0] w1[1] ... |  | b[0] b[1] ... |                          copies, gradients

Neighbouring ranks that own equally many rows of a parameter, at equal distances in the rank-major
buffer, form a *run*; one strided copy moves a run. Exact cuts give one run per parameter whatever
the world size, uneven ones mostly two (torch.chunk's cut leaves one rank with less), rows on one
owner one. The numbers are `Tensor.as_strided` arguments, so that moving costs two views and one
copy, and nothing is computed per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from shardwise.layout.bucket import BucketLayout, ParamLayout
from shardwise.layout.reduce import ReduceLayout


@dataclass(frozen=True, slots=True)
class Move:
    """One run of one parameter. Both sides have `size` = (ranks, outer, rows of one rank * inner).

    `whole_offset` counts from the parameter's first element, `packed_offset` from the start of the
    rank-major buffer.
    """

    index: int  # position in the params that were given
    first_row: int
    rows: int  # of each rank
    size: tuple[int, int, int]
    packed_stride: tuple[int, int, int]
    packed_offset: int
    whole_stride: tuple[int, int, int]
    whole_offset: int
    is_all: bool  # the run is the whole parameter as it lies: a view of it does

    def packed(self, buffer: torch.Tensor) -> torch.Tensor:
        """The run in a flat rank-major buffer."""
        return buffer.as_strided(
            self.size, self.packed_stride, buffer.storage_offset() + self.packed_offset
        )

    def whole(self, buffer: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """The run in a contiguous tensor whose element `offset` is the parameter's first."""
        return buffer.as_strided(
            self.size, self.whole_stride, buffer.storage_offset() + offset + self.whole_offset
        )


@dataclass(frozen=True, slots=True)
class Packing:
    """A rank-major buffer: where each rank's chunk starts (and the last ends), and its moves."""

    starts: tuple[int, ...]
    moves: tuple[tuple[Move, ...], ...]  # per parameter

    @property
    def numel(self) -> int:
        return self.starts[-1]

    def chunk(self, buffer: torch.Tensor, rank: int) -> torch.Tensor:
        return buffer[self.starts[rank] : self.starts[rank + 1]]


def pack_shards(layout: BucketLayout, *, padded: bool) -> Packing:
    """Shard buffers end to end: each of `chunk_numel` elements, or cut to what its rank fills."""
    if padded:
        sizes = [layout.chunk_numel] * layout.world
    else:
        sizes = [layout.shard_numel(r) for r in range(layout.world)]
    offsets = [layout.shard_offsets(r) for r in range(layout.world)]
    return _pack(layout.params, offsets, sizes, with_padding=True)


def pack_grads(layout: ReduceLayout, *, padded: bool) -> Packing:
    """Chunks of a reduction end to end. Unpadded, the counts follow each rank's data directly."""
    if padded:
        sizes = [layout.chunk_numel] * layout.world
    else:
        sizes = [layout.data_numel(r) + len(layout.indices) for r in range(layout.world)]
    offsets = [layout.offsets(r) for r in range(layout.world)]
    return _pack(layout.params, offsets, sizes, with_padding=False)


def _pack(
    params: Sequence[ParamLayout],
    offsets: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    *,
    with_padding: bool,
) -> Packing:
    """`with_padding`: the whole has room for that of its parts; a gradient has none."""
    starts = tuple(accumulate(sizes, initial=0))
    places = [
        [start + at for at in rank_offsets]
        for start, rank_offsets in zip(starts, offsets, strict=False)
    ]
    moves: list[tuple[Move, ...]] = []
    for i, param in enumerate(params):
        places_of = [rank[i] for rank in places]
        if with_padding and param.is_padded and param.numel:  # as are all: equal distances
            moves.append((_move(i, param, list(range(param.cuts.world)), places_of),))
        else:
            moves.append(_moves_of(i, param, places_of))
    return Packing(starts, tuple(moves))


def _moves_of(index: int, param: ParamLayout, places: Sequence[int]) -> tuple[Move, ...]:
    """Runs of one parameter; `places[r]` is where rank r's part starts in the rank-major buffer."""
    if not param.numel:
        return ()
    runs: list[list[int]] = []  # ranks
    for rank in range(param.cuts.world):
        rows = param.cuts.size(rank)
        if not rows:
            continue
        if runs and _continues(runs[-1], rank, rows, param, places):
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return tuple(_move(index, param, run, places) for run in runs)


def _continues(
    run: list[int], rank: int, rows: int, param: ParamLayout, places: Sequence[int]
) -> bool:
    if rows != param.cuts.size(run[-1]):
        return False
    return len(run) == 1 or places[rank] - places[run[-1]] == places[run[1]] - places[run[0]]


def _move(index: int, param: ParamLayout, run: list[int], places: Sequence[int]) -> Move:
    rows, first_row = param.cuts.size(run[0]), param.cuts.start(run[0])
    part = rows * param.inner
    step = places[run[1]] - places[run[0]] if len(run) > 1 else part
    return Move(
        index=index,
        first_row=first_row,
        rows=rows,
        size=(len(run), param.outer, part),
        packed_stride=(step, part, 1),
        packed_offset=places[run[0]],
        whole_stride=(part, param.rows * param.inner, 1),
        whole_offset=first_row * param.inner,
        is_all=param.outer == 1 and len(run) * rows == param.rows,
    )
