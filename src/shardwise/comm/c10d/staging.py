"""Staging of gathers: from rank-major order into the gathered buffer.

    GatherPlan      rank-major buffer -> gathered buffer (copy-out)
    GatherStaging   the buffer, and the views through which it is unpacked

For transports that move one rank-major buffer per bucket. The bucket keeps the plans, which hold
numbers only, and the buffers: their storage is empty between uses, so they cost no memory then, and
the allocator is what keeps its pages warm; but the views that are copied from and to are made once,
because making them would take longer than copying small parameters does. A buffer that is still in
use is left alone and another one takes its place.

Where all parts of each parameter take equal space (`is_regular`), one call unpacks the whole
buffer. On CUDA it is one launch; copies of runs (`Move`) are one each.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch_compat import foreach_copy
from shardwise.comm.blocks import Blocks
from shardwise.comm.c10d.bucket import C10dBucket
from shardwise.layout import BucketLayout, Move, Packing, pack_shards


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """How a rank-major buffer is unpacked; `in_place`: it is the gathered buffer already."""

    packing: Packing
    padded: bool
    in_place: bool
    moves: tuple[tuple[Move, int], ...]  # and the parameter's offset in the gathered buffer
    # Where one call unpacks: what follows in each rank's chunk, (elements, parameter or -1: a gap).
    pieces: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, bucket: C10dBucket) -> GatherPlan:
        """The bucket's plan, made at its first gather."""
        plan = bucket.gather_plan
        if plan is None:
            layout = bucket.layout
            padded = layout.sends_padded
            packing = pack_shards(layout, padded=padded)
            moves = tuple(
                (m, layout.params[m.index].full_offset)
                for of_param in packing.moves
                for m in of_param
            )
            pieces = _pieces(layout) if padded and layout.is_regular else ()
            plan = cls(packing, padded, layout.is_rank_major, moves, pieces)
            bucket.gather_plan = plan
        return plan


def _pieces(layout: BucketLayout) -> tuple[tuple[int, int], ...]:
    """All ranks' chunks are alike."""
    pieces, at = [], 0
    for index, (start, param) in enumerate(
        zip(layout.shard_offsets(0), layout.params, strict=True)
    ):
        space = param.full_space // layout.world
        pieces += [(start - at, -1), (space, index)]
        at = start + space
    return tuple(
        (numel, index) for numel, index in (*pieces, (layout.chunk_numel - at, -1)) if numel
    )


class Staging:
    """A rank-major buffer whose views are made once, over memory that comes and goes."""

    __slots__ = ("_blocks", "_size_bytes", "_storage", "is_free", "packed")

    def __init__(self, numel: int, like: torch.Tensor, custom: Any) -> None:
        """By the user's collective where it brings `allocate` (FSDP2's `set_custom_*`)."""
        self._blocks, self._size_bytes = Blocks.of_process(), numel * like.itemsize
        self._storage: torch.UntypedStorage | None = None  # None: memory of somebody else
        self.is_free = False
        if custom is None:
            self._storage = torch.UntypedStorage(0, device=like.device)
            self._blocks.fill(self._storage, self._size_bytes)
            self.packed = like.new_empty(0).set_(self._storage, 0, (numel,), (1,))
        elif hasattr(custom, "allocate"):
            self.packed = custom.allocate((numel,), dtype=like.dtype, device=like.device)
        else:
            self.packed = like.new_empty(numel)

    def take_again(self) -> None:
        self.is_free = False
        if self._storage is not None:
            self._blocks.fill(self._storage, self._size_bytes)

    def give_back(self) -> None:
        """The collective has read it, or will not: the memory goes back."""
        if self._storage is not None:
            self._blocks.empty(self._storage)
        self.is_free = True


class GatherStaging(Staging):
    """With the views through which it is unpacked into the gathered buffer."""

    __slots__ = ("_rows", "_sizes", "_sources", "_targets", "num_views", "out", "own")

    def __init__(
        self, layout: BucketLayout, plan: GatherPlan, out: torch.Tensor, rank: int, custom: Any
    ) -> None:
        super().__init__(plan.packing.numel, out, custom)
        packed = self.packed
        self.own = plan.packing.chunk(packed, rank)
        self.out = out
        self._sizes = [numel for numel, _ in plan.pieces]
        if plan.pieces:
            self._rows = packed.view(layout.world, -1)
            self._targets = [_place(layout, numel, index, out) for numel, index in plan.pieces]
            self.num_views = sum(index >= 0 for _, index in plan.pieces)
        else:
            self._sources = [move.packed(packed) for move, _ in plan.moves]
            self._targets = [move.whole(out, offset) for move, offset in plan.moves]
            self.num_views = len(self._targets)

    @classmethod
    def take(
        cls, bucket: C10dBucket, plan: GatherPlan, out: torch.Tensor, custom: Any
    ) -> GatherStaging:
        """The bucket's own buffer, unless it is in use or the user's collective allocates."""
        known = bucket.gather_staging
        if type(known) is cls and known.is_free and known.out is out and custom is None:
            known.take_again()
            return known
        made = cls(bucket.layout, plan, out, bucket.shard.rank, custom)
        if custom is None:
            keep_from_second(bucket, made, out)
        return made

    def unpack(self) -> None:
        """To the gathered buffer; the memory of this one goes back."""
        if self._sizes:
            torch.split_with_sizes_copy(self._rows, self._sizes, dim=1, out=self._targets)
        else:
            foreach_copy(self._targets, self._sources)
        if self._storage is not None:  # as `give_back`, without the call
            self._blocks.empty(self._storage)
        self.is_free = True


def keep_from_second(bucket: C10dBucket, made: Any, out: torch.Tensor) -> None:
    """It is kept from the second gather into the same `out` on: views would keep one alive that is
    not gathered to any more.
    """
    before = bucket.gathered_to
    if before is not None and before() is out:
        bucket.gather_staging = made
    bucket.gathered_to = weakref.ref(out)


def _place(layout: BucketLayout, numel: int, index: int, out: torch.Tensor) -> torch.Tensor:
    """Where all ranks' parts of a parameter belong, a row each; a gap belongs nowhere."""
    if index < 0:
        return out.new_empty(layout.world, numel)
    start = layout.params[index].full_offset
    return out[start : start + layout.world * numel].view(layout.world, numel)
