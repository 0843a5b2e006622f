"""Gradients of one reduction in rank-major order.

    ReducePlan      gradients -> rank-major buffer (copy-in), padding, counts
    ReduceStaging   the buffer, with the views that are written to; like that of gathers
    PackedGrads     a GradBuffer over one

Gradients of up to `BATCHED_BYTES` are held as they arrive and copied together, by one call; on
accelerators all are, whatever their size: there a copy costs a launch. The buffer is taken when the
first one is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, repeat
from operator import attrgetter, is_
from types import SimpleNamespace
from typing import Any

import torch

from shardwise._torch_compat import chunk_cat, foreach_copy
from shardwise.comm.c10d.bucket import C10dBucket
from shardwise.comm.c10d.staging import Staging
from shardwise.layout import Move, Packing, ReduceLayout, pack_grads

BATCHED_BYTES = 2**18  # of gradients that are held until they are copied together

# What is asked of all gradients is asked by one `map`, which stays in C.
_dtype = attrgetter("dtype")
_is_contiguous = torch.Tensor.is_contiguous

# Arguments of as_strided: a matrix with one row per rank.
Rows = tuple[tuple[int, int], tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """How gradients are packed; `counts` and `gaps` (padding) are matrices in the packed buffer."""

    layout: ReduceLayout
    packing: Packing
    padded: bool
    counts: tuple[Rows, ...]
    gaps: tuple[Rows, ...]
    own: tuple[
        int, int, int
    ]  # this rank's chunk: start, elements of data; where counts belong in `out`

    @classmethod
    def of(cls, bucket: C10dBucket, layout: ReduceLayout) -> ReducePlan:
        """The plan of the bucket's latest reduce layout; another trainable part makes a new one."""
        plan = bucket.reduce_plan
        if plan is None or plan.layout.indices != layout.indices:
            plan = bucket.reduce_plan = cls._make(layout, bucket.shard.rank)
        return plan

    @classmethod
    def _make(cls, layout: ReduceLayout, rank: int) -> ReducePlan:
        padded = layout.sends_padded
        packing = pack_grads(layout, padded=padded)
        world, num = layout.world, len(layout.indices)
        data = [layout.data_numel(r) for r in range(world)]
        starts, counts_at = packing.starts, layout.counts_offset
        if padded:
            chunk = layout.chunk_numel
            counts: tuple[Rows, ...] = (((world, num), (chunk, 1), counts_at),)
            gaps = (*_gaps(data, layout.largest_numel, chunk), *_padding(layout, starts))
        else:
            counts = tuple(((1, num), (num, 1), starts[r] + data[r]) for r in range(world))
            gaps = ()
        own = (starts[rank], data[rank], counts_at)
        return cls(layout, packing, padded, counts, gaps, own)

    def unpack_own(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Chunks of exact size: this rank's data and counts to their places in `out`."""
        start, data, counts_offset = self.own
        num = len(self.layout.indices)
        out[:data].copy_(packed[start : start + data])
        out[data:counts_offset].zero_()
        out[counts_offset:].copy_(packed[start + data : start + data + num])


class ReduceStaging(Staging):
    """With its views: where each gradient, the padding and the counts go."""

    __slots__ = ("_ones", "counts", "ends", "gaps", "plan", "rows", "runs")

    def __init__(self, plan: ReducePlan, out: torch.Tensor, custom: Any) -> None:
        super().__init__(plan.packing.numel, out, custom)
        self.plan, packed = plan, self.packed
        self.runs = tuple(
            tuple((move, move.packed(packed)) for move in moves) for moves in plan.packing.moves
        )
        self.gaps = [_matrix(packed, rows) for rows in plan.gaps]
        self.counts = [_matrix(packed, rows) for rows in plan.counts]
        # A row per rank, where one call packs all, and what comes behind the gradients of a row.
        layout, is_regular = plan.layout, plan.padded and plan.layout.is_regular
        rows = packed.view(layout.world, -1) if plan.padded else None
        self.rows = rows if is_regular else None
        self.ends = None if rows is None else rows[:, layout.largest_numel :]
        self._ones: dict[torch.dtype, torch.Tensor] = {}

    def ones(self, dtype: torch.dtype) -> torch.Tensor:
        """What follows the gradients: padding, and a count of one for each rank and parameter.
        Kept: a lane that reads it may be behind.
        """
        known = self._ones.get(dtype)
        if known is None:
            layout = self.plan.layout
            size = (layout.world, layout.chunk_numel - layout.largest_numel)
            known = torch.ones(size, dtype=dtype, device=self.packed.device)
            known[:, : layout.counts_offset - layout.largest_numel].zero_()
            self._ones[dtype] = known
        return known

    @classmethod
    def take(
        cls, bucket: C10dBucket, plan: ReducePlan, out: torch.Tensor, custom: Any
    ) -> ReduceStaging:
        """The bucket's own buffer, unless it is in use or the user's collective allocates."""
        if bucket.shard.size == 1:
            itself = SimpleNamespace(allocate=lambda *_, **__: out)
            return cls(plan, out, itself)
        known = bucket.reduce_staging
        if known is not None and known.is_free and known.plan is plan and custom is None:
            known.take_again()
            return known
        made = cls(plan, out, custom)
        if custom is None:
            bucket.reduce_staging = made
        return made


class PackedGrads:
    """See the module docstring."""

    __slots__ = (
        *("_arrived", "_bucket", "_held", "_held_bytes", "_holds_all", "_is_packed", "_out"),
        *("_pre_scale", "_staging", "plan"),
    )

    def __init__(
        self, bucket: C10dBucket, plan: ReducePlan, out: torch.Tensor, pre_scale: float
    ) -> None:
        self._bucket, self.plan, self._out = bucket, plan, out
        self._staging: ReduceStaging | None = None
        self._pre_scale = pre_scale
        self._arrived = [False] * len(plan.layout.indices)
        self._held: dict[int, torch.Tensor] = {}
        self._held_bytes = 0
        self._holds_all = bucket.streams.is_async
        self._is_packed = False

    def put(self, index: int, grad: torch.Tensor) -> None:
        assert not self._is_packed, "put after the reduction was issued"
        if grad.requires_grad:  # create_graph=True: staging is no part of the user's graph
            grad = grad.detach()
        if self._arrived[index]:
            self._copy_held()
            self._copy(index, grad, adds=True)
            return
        self._arrived[index] = True
        size = grad.nbytes
        if self._pre_scale != 1.0 or (size > BATCHED_BYTES and not self._holds_all):
            self._copy(index, grad, adds=False)
            return
        self._held[index] = grad
        self._held_bytes += size
        if self._held_bytes > BATCHED_BYTES and not self._holds_all:
            self._copy_held()

    def _taken(self) -> ReduceStaging:
        if self._staging is None:
            bucket = self._bucket
            memory = bucket.memory if bucket.reduce_scatter is None else bucket.reduce_scatter
            self._staging = ReduceStaging.take(bucket, self.plan, self._out, memory)
        return self._staging

    def _concatenate(self) -> bool:
        """The whole buffer by one call, where all gradients are held and lie as it needs them."""
        staging, held = self._staging or self._taken(), self._held
        if staging.rows is None or not held:
            return False
        grads = [held[index] for index in range(len(held))]
        dtype = grads[0].dtype
        if not all(map(is_, map(_dtype, grads), repeat(dtype))):
            return False
        if not all(map(_is_contiguous, grads)):
            return False
        chunk_cat([*grads, staging.ones(dtype)], self.plan.layout.world, staging.rows)
        self._held = {}
        return True

    def _copy_held(self) -> None:
        """By one call; gradients with strides of their own, one after the other."""
        held, self._held, self._held_bytes = self._held, {}, 0
        targets, sources = [], []
        runs = self._taken().runs
        for index, grad in held.items():
            if not grad.is_contiguous():
                self._copy(index, grad, adds=False)
                continue
            for move, target in runs[index]:
                sources.append(grad.view(move.size) if move.is_all else move.whole(grad))
                targets.append(target)
        if targets:
            foreach_copy(targets, sources)

    def _copy(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        contiguous = grad.is_contiguous()
        for move, place in self._taken().runs[index]:
            target = place
            if contiguous:
                source = move.whole(grad)
            else:
                source = _strided_part(grad, self.plan.layout.params[index].spec.shard_dim, move)
                target = target.view(source.shape)
            if adds:
                target.add_(source, alpha=self._pre_scale)
            elif self._pre_scale != 1.0:
                torch.mul(
                    source, self._pre_scale, out=target
                )  # scaled before it is cast: 1e5 does not fit fp16
            else:
                target.copy_(source)

    @property
    def had(self) -> tuple[bool, ...]:
        return tuple(self._arrived)

    def discard(self) -> None:
        staging, self._staging, self._held = self._staging, None, {}
        self._is_packed = True
        if staging is not None:
            staging.give_back()

    def pack(self) -> None:
        """Write what is held, what never arrived, the padding and the counts."""
        self._is_packed = True
        if not (len(self._held) == len(self._arrived) and self._concatenate()):
            self._copy_all()

    def _copy_all(self) -> None:
        if self._held:
            self._copy_held()
        staging = self._staging or self._taken()
        if not any(self._arrived):
            staging.packed.zero_()
            return
        for gap in staging.gaps:
            gap.zero_()
        if staging.ends is not None:
            staging.ends.copy_(staging.ones(staging.packed.dtype))
        else:
            for counts in staging.counts:
                counts.fill_(1)
        if not all(self._arrived):
            self._clear_missing(staging)

    def finish(self) -> ReduceStaging:
        """Pack, if nobody has, and give the buffer away."""
        if not self._is_packed:
            self.pack()
        staging, self._staging = self._staging, None
        assert staging is not None, "a gradient buffer is reduced once"
        return staging

    def _clear_missing(self, staging: ReduceStaging) -> None:
        for index, arrived in enumerate(self._arrived):
            if not arrived:
                for _, target in staging.runs[index]:
                    target.zero_()
                for counts in staging.counts:
                    counts[:, index].zero_()


def _matrix(packed: torch.Tensor, rows: Rows) -> torch.Tensor:
    size, stride, offset = rows
    return packed.as_strided(size, stride, packed.storage_offset() + offset)


def _gaps(data: list[int], counts_at: int, chunk: int) -> list[Rows]:
    """Space between data and counts: one matrix for neighbouring ranks with as much data."""
    gaps: list[Rows] = []
    for numel, run in groupby(range(len(data)), key=data.__getitem__):
        ranks = list(run)
        if numel < counts_at:
            gaps.append(((len(ranks), counts_at - numel), (chunk, 1), ranks[0] * chunk + numel))
    return gaps


def _padding(layout: ReduceLayout, starts: tuple[int, ...]) -> list[Rows]:
    """Behind parts that take more space than they fill."""
    gaps: list[Rows] = []
    for rank, start in enumerate(starts[:-1]):
        for param, at in zip(layout.params, layout.offsets(rank), strict=True):
            filled = param.shard_numel(rank)
            if param.is_padded and (left := param.shard_numel(0) - filled):
                gaps.append(((1, left), (left, 1), start + at + filled))
    return gaps


def _strided_part(grad: torch.Tensor, dim: int, move: Move) -> torch.Tensor:
    """A run of a gradient with any strides (transposed, expanded): (ranks, *shape of a part)."""
    ranks = move.size[0]
    part = grad.narrow(dim, move.first_row, ranks * move.rows)
    return part.unflatten(dim, (ranks, move.rows)).movedim(dim, 0)
