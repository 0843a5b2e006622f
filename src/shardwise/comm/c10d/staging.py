"""Staging between parameter-major and rank-major order: plans, and the buffer of a reduction.

    GatherPlan     rank-major buffer -> gathered buffer (copy-out)
    ReducePlan     gradients -> rank-major buffer (copy-in), padding, counts
    PackedGrads    a GradBuffer over one rank-major staging buffer

For transports that move one rank-major buffer per bucket. The bucket keeps the plans, which hold
numbers only, and the buffers (`GatherStaging`, `ReduceStaging`): their storage is empty between
uses, so they cost no memory then, and the allocator is what keeps its pages warm; but the views
that are copied from and to are made once, because making them would take longer than copying small
parameters does. A buffer that is still in use is left alone and another one takes its place.

Gradients of up to `BATCHED_BYTES` are held as they arrive and copied together, by one call.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import groupby, repeat
from operator import attrgetter, is_
from types import SimpleNamespace
from typing import Any

import torch

from shardwise._torch_compat import chunk_cat, foreach_copy
from shardwise.comm.blocks import Blocks
from shardwise.comm.streams import Streams
from shardwise.comm.transport import Bucket
from shardwise.layout import Move, Packing, ReduceLayout, pack_grads, pack_shards

BATCHED_BYTES = 2**18  # of gradients that are held until they are copied together

# What is asked of all gradients is asked by one `map`, which stays in C.
_dtype = attrgetter("dtype")
_is_contiguous = torch.Tensor.is_contiguous


@dataclass(slots=True, eq=False, kw_only=True)
class C10dBucket(Bucket):
    """A bucket with its plans, the buffers that are used again, and the user's own collectives."""

    all_gather: Any = None
    reduce_scatter: Any = None
    gather_plan: GatherPlan | None = None
    gather_staging: GatherStaging | None = None
    gathered_to: weakref.ref[torch.Tensor] | None = None
    reduce_plan: ReducePlan | None = None
    reduce_staging: ReduceStaging | None = None

    def use_collective(self, kind: str, comm: Any) -> None:
        assert kind in ("all_gather", "reduce_scatter"), kind
        setattr(self, kind, comm)


# Arguments of as_strided: a matrix with one row per rank.
Rows = tuple[tuple[int, int], tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """How a rank-major buffer is unpacked; `in_place`: it is the gathered buffer already."""

    packing: Packing
    padded: bool
    in_place: bool
    moves: tuple[tuple[Move, int], ...]  # and the parameter's offset in the gathered buffer

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
            plan = bucket.gather_plan = cls(packing, padded, layout.is_rank_major, moves)
        return plan


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

    __slots__ = ("_out", "_sources", "_targets", "own")

    def __init__(self, plan: GatherPlan, out: torch.Tensor, rank: int, custom: Any) -> None:
        super().__init__(plan.packing.numel, out, custom)
        packed = self.packed
        self.own = plan.packing.chunk(packed, rank)
        self._out = out
        self._sources = [move.packed(packed) for move, _ in plan.moves]
        self._targets = [move.whole(out, offset) for move, offset in plan.moves]

    @classmethod
    def take(
        cls, bucket: C10dBucket, plan: GatherPlan, out: torch.Tensor, custom: Any
    ) -> GatherStaging:
        """The bucket's own buffer, unless it is in use or the user's collective allocates. It is
        kept from the second gather into the same `out` on: views would keep one alive that is not.
        """
        known = bucket.gather_staging
        if known is not None and known.is_free and known._out is out and custom is None:
            known.take_again()
            return known
        made = cls(plan, out, bucket.shard.rank, custom)
        before = bucket.gathered_to
        if custom is None and before is not None and before() is out:
            bucket.gather_staging = made
        bucket.gathered_to = weakref.ref(out)
        return made

    def unpack(self) -> None:
        """To the gathered buffer; the memory of this one goes back."""
        foreach_copy(self._targets, self._sources)
        self.give_back()


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """How gradients are packed; `counts` and `gaps` (padding) are matrices in the packed buffer."""

    layout: ReduceLayout
    packing: Packing
    padded: bool
    counts: tuple[Rows, ...]
    gaps: tuple[Rows, ...]
    is_even: bool  # torch.chunk along dim 0 cuts every gradient as the buffer wants it
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
        starts, counts_offset = packing.starts, max(data)
        if padded:
            chunk = layout.chunk_numel
            counts: tuple[Rows, ...] = (((world, num), (chunk, 1), counts_offset),)
            gaps = tuple(_gaps(data, counts_offset, chunk))
        else:
            counts = tuple(((1, num), (num, 1), starts[r] + data[r]) for r in range(world))
            gaps = ()
        is_even = padded and all(
            p.spec.shard_dim == 0 and p.spec.shape and p.numel and p.cuts.is_exact
            for p in layout.params
        )
        own = (starts[rank], data[rank], counts_offset)
        return cls(layout, packing, padded, counts, gaps, is_even, own)

    def unpack_own(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Chunks of exact size: this rank's data and counts to their places in `out`."""
        start, data, counts_offset = self.own
        num = len(self.layout.indices)
        out[:data].copy_(packed[start : start + data])
        out[data:counts_offset].zero_()
        out[counts_offset:].copy_(packed[start + data : start + data + num])


class ReduceStaging(Staging):
    """With its views: where each gradient, the padding and the counts go."""

    __slots__ = ("_ones", "counts", "gaps", "plan", "rows", "runs", "streams")

    def __init__(self, plan: ReducePlan, out: torch.Tensor, streams: Streams, custom: Any) -> None:
        super().__init__(plan.packing.numel, out, custom)
        self.plan, self.streams, packed = plan, streams, self.packed
        self.runs = tuple(
            tuple((move, move.packed(packed)) for move in moves) for moves in plan.packing.moves
        )
        self.gaps = [_matrix(packed, rows) for rows in plan.gaps]
        self.counts = [_matrix(packed, rows) for rows in plan.counts]
        # Where all is cut evenly along dim 0, a row per rank, and what its counts are made of.
        world = plan.layout.world
        self.rows = packed.view(world, -1) if plan.is_even else None
        self._ones: dict[torch.dtype, torch.Tensor] = {}

    def ones(self, dtype: torch.dtype) -> torch.Tensor:
        """Counts of one for each rank and parameter. Kept: a lane that reads them may be behind."""
        known = self._ones.get(dtype)
        if known is None:
            size = (self.plan.layout.world, len(self.plan.layout.indices))
            known = self._ones[dtype] = torch.ones(size, dtype=dtype, device=self.packed.device)
        return known

    @classmethod
    def take(
        cls, bucket: C10dBucket, plan: ReducePlan, out: torch.Tensor, custom: Any
    ) -> ReduceStaging:
        """The bucket's own buffer, unless it is in use or the user's collective allocates."""
        if bucket.shard.size == 1:
            itself = SimpleNamespace(allocate=lambda *_, **__: out)
            return cls(plan, out, bucket.streams, itself)
        known = bucket.reduce_staging
        if known is not None and known.is_free and known.plan is plan and custom is None:
            known.take_again()
            return known
        made = cls(plan, out, bucket.streams, custom)
        if custom is None:
            bucket.reduce_staging = made
        return made


class PackedGrads:
    """Gradients of one reduction in rank-major order, copied in as they arrive."""

    __slots__ = ("_arrived", "_held", "_held_bytes", "_pre_scale", "_staging", "plan")

    def __init__(self, plan: ReducePlan, staging: ReduceStaging, pre_scale: float) -> None:
        self.plan = plan
        self._staging: ReduceStaging | None = staging
        self._pre_scale = pre_scale
        self._arrived = [False] * len(plan.layout.indices)
        self._held: dict[int, torch.Tensor] = {}
        self._held_bytes = 0

    def put(self, index: int, grad: torch.Tensor) -> None:
        assert self._staging is not None, "put after the reduction was issued"
        if grad.requires_grad:  # create_graph=True: staging is no part of the user's graph
            grad = grad.detach()
        if self._arrived[index]:
            self._copy_held()
            self._copy(index, grad, adds=True)
            return
        self._arrived[index] = True
        size = grad.nbytes
        if size > BATCHED_BYTES or self._pre_scale != 1.0:
            self._copy(index, grad, adds=False)
            return
        self._held[index] = grad
        self._held_bytes += size
        if self._held_bytes > BATCHED_BYTES:
            self._copy_held()

    def _concatenate(self) -> bool:
        """The whole buffer by one call, where all gradients are held and lie as it needs them."""
        staging, held = self._staging, self._held
        assert staging is not None
        if staging.rows is None or not held:
            return False
        grads = [held[index] for index in range(len(held))]
        dtype = grads[0].dtype
        if not all(map(is_, map(_dtype, grads), repeat(dtype))):
            return False
        if not all(map(_is_contiguous, grads)):
            return False
        if staging.streams.is_async:
            for grad in grads:
                staging.streams.used_here(grad)
        chunk_cat([*grads, staging.ones(dtype)], self.plan.layout.world, staging.rows)
        self._held = {}
        return True

    def _copy_held(self) -> None:
        """By one call; gradients with strides of their own, one after the other."""
        assert self._staging is not None
        held, self._held, self._held_bytes = self._held, {}, 0
        targets, sources, streams = [], [], self._staging.streams
        for index, grad in held.items():
            if streams.is_async:
                streams.used_here(grad)  # it was held for a lane, perhaps, and goes now
            if not grad.is_contiguous():
                self._copy(index, grad, adds=False)
                continue
            for move, target in self._staging.runs[index]:
                sources.append(grad.view(move.size) if move.is_all else move.whole(grad))
                targets.append(target)
        if targets:
            foreach_copy(targets, sources)

    def _copy(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        assert self._staging is not None
        contiguous = grad.is_contiguous()
        for move, place in self._staging.runs[index]:
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
        if staging is not None:
            staging.give_back()

    def finish(self) -> ReduceStaging:
        """Write what never arrived, the padding and the counts, and give the buffer away."""
        assert self._staging is not None, "a gradient buffer is reduced once"
        staging = self._staging
        if len(self._held) == len(self._arrived) and self._concatenate():
            self._staging = None
            return staging
        if self._held:
            self._copy_held()
        self._staging = None
        if not any(self._arrived):
            staging.packed.zero_()
            return staging
        for gap in staging.gaps:
            gap.zero_()
        for counts in staging.counts:
            counts.fill_(1)
        if not all(self._arrived):
            self._clear_missing(staging)
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


def _gaps(data: list[int], counts_offset: int, chunk: int) -> list[Rows]:
    """Space between data and counts: one matrix for neighbouring ranks with as much data."""
    gaps: list[Rows] = []
    for numel, run in groupby(range(len(data)), key=data.__getitem__):
        ranks = list(run)
        if numel < counts_offset:
            gaps.append(((len(ranks), counts_offset - numel), (chunk, 1), ranks[0] * chunk + numel))
    return gaps


def _strided_part(grad: torch.Tensor, dim: int, move: Move) -> torch.Tensor:
    """A run of a gradient with any strides (transposed, expanded): (ranks, *shape of a part)."""
    ranks = move.size[0]
    part = grad.narrow(dim, move.first_row, ranks * move.rows)
    return part.unflatten(dim, (ranks, move.rows)).movedim(dim, 0)
