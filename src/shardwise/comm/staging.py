"""Staging between parameter-major and rank-major order: plans, and the buffer of a reduction.

    GatherPlan     rank-major buffer -> gathered buffer (copy-out)
    ReducePlan     gradients -> rank-major buffer (copy-in), padding, counts
    PackedGrads    a GradBuffer over one rank-major staging buffer

For transports that move one rank-major buffer per bucket. Plans live in `bucket.private`; they hold
numbers only, no tensors, because staging is made anew for each use and the caching allocator is
what keeps its pages warm.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch

from shardwise.comm.transport import Bucket
from shardwise.layout import Move, Packing, ReduceLayout, pack_grads, pack_shards

# Arguments of as_strided: a matrix with one row per rank.
Rows = tuple[tuple[int, int], tuple[int, int], int]


def used_here(tensor: torch.Tensor) -> None:
    """Keep the allocator from reusing memory before the current stream has passed this point.

    Free on the stream that it was made on.
    """
    if tensor.device.type not in ("cpu", "meta"):
        streams = torch.get_device_module(tensor.device)
        tensor.record_stream(streams.current_stream(tensor.device))


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """How a rank-major buffer is unpacked; `in_place`: it is the gathered buffer already."""

    packing: Packing
    padded: bool
    in_place: bool
    moves: tuple[tuple[Move, int], ...]  # and the parameter's offset in the gathered buffer

    @classmethod
    def of(cls, bucket: Bucket) -> GatherPlan:
        """The bucket's plan, made at its first gather."""
        plan = bucket.private.get("gather_plan")
        if plan is None:
            layout = bucket.layout
            padded = layout.sends_padded
            packing = pack_shards(layout, padded=padded)
            moves = tuple(
                (m, layout.params[m.index].full_offset)
                for of_param in packing.moves
                for m in of_param
            )
            plan = bucket.private["gather_plan"] = cls(packing, padded, layout.is_rank_major, moves)
        return plan

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        if self.in_place:
            return
        used_here(packed)
        for move, offset in self.moves:
            move.whole(out, offset).copy_(move.packed(packed))


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
    def of(cls, bucket: Bucket, layout: ReduceLayout) -> ReducePlan:
        """The plan of the bucket's latest reduce layout; another trainable part makes a new one."""
        plan = bucket.private.get("reduce_plan")
        if plan is None or plan.layout.indices != layout.indices:
            plan = bucket.private["reduce_plan"] = cls._make(layout, bucket.shard.rank)
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
        return cls(layout, packing, padded, counts, gaps, (starts[rank], data[rank], counts_offset))

    def unpack_own(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Chunks of exact size: this rank's data and counts to their places in `out`."""
        start, data, counts_offset = self.own
        num = len(self.layout.indices)
        out[:data].copy_(packed[start : start + data])
        out[data:counts_offset].zero_()
        out[counts_offset:].copy_(packed[start + data : start + data + num])


class PackedGrads:
    """Gradients of one reduction in rank-major order, copied in as they arrive."""

    __slots__ = ("_arrived", "_packed", "_pre_scale", "plan")

    def __init__(self, plan: ReducePlan, packed: torch.Tensor, pre_scale: float) -> None:
        self.plan = plan
        self._packed: torch.Tensor | None = packed
        self._pre_scale = pre_scale
        self._arrived = [False] * len(plan.layout.indices)

    def put(self, index: int, grad: torch.Tensor) -> None:
        packed = self._packed
        assert packed is not None, "put after the reduction was issued"
        if grad.requires_grad:  # create_graph=True: staging is no part of the user's graph
            grad = grad.detach()
        used_here(packed)
        used_here(grad)  # the engine drops it as soon as this returns
        contiguous = grad.is_contiguous()
        for move in self.plan.packing.moves[index]:
            target = move.packed(packed)
            if contiguous:
                source = move.whole(grad)
            else:
                source = _strided_part(grad, self.plan.layout.params[index].spec.shard_dim, move)
                target = target.view(source.shape)
            if self._arrived[index]:
                target.add_(source, alpha=self._pre_scale)
            elif self._pre_scale != 1.0:
                torch.mul(
                    source, self._pre_scale, out=target
                )  # scaled before it is cast: 1e5 does not fit fp16
            else:
                target.copy_(source)
        self._arrived[index] = True

    def has(self, index: int) -> bool:
        return self._arrived[index]

    def discard(self) -> None:
        self._packed = None

    def finish(self) -> torch.Tensor:
        """Write what never arrived, the padding and the counts, and give the buffer away."""
        packed, self._packed = self._packed, None
        assert packed is not None, "a gradient buffer is reduced once"
        used_here(packed)
        plan, missing = self.plan, [i for i, arrived in enumerate(self._arrived) if not arrived]
        if len(missing) == len(self._arrived):
            return packed.zero_()
        for rows in plan.gaps:
            _matrix(packed, rows).zero_()
        for index in missing:
            for move in plan.packing.moves[index]:
                move.packed(packed).zero_()
        for rows in plan.counts:
            counts = _matrix(packed, rows).fill_(1)
            for index in missing:
                counts[:, index].zero_()
        return packed


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
