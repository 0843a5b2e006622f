"""Without staging: one group of collectives reads shards, or gradients, where they are, and writes
where they belong.

    gather   parts of w1, w2, b            -> w1, w2, b whole, in the gathered buffer
    reduce   gradients of w1, w2, b, ones  -> this rank's parts of the sums, and the counts

The gathered buffer is parameter-major: where all parts of a parameter take equal space they lie in
rank order, as an all-gather writes them. Saved are a buffer as large as the bucket, and its copies.
A group of small collectives costs more than one (how much more on NCCL nobody here has measured),
so it pays for large parameters only. The backend must be able to start several as one
(`supports_coalescing`): NCCL is, Gloo is not. Idea: PyTorch RFC 187239.
"""

from __future__ import annotations

import torch

from shardwise.comm.c10d.bucket import C10dBucket
from shardwise.comm.c10d.packed_grads import PackedGrads, ReducePlan
from shardwise.comm.c10d.staging import Staging, keep_from_second
from shardwise.layout import BucketLayout, ReduceLayout

LARGE_BYTES = 2**20  # of a gathered parameter, on average

WIRE_DTYPES = frozenset(
    (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int32, torch.int64, torch.uint8, torch.int8),
    )
)  # what every backend moves


def gather_pays(layout: BucketLayout) -> bool:
    """Whether a bucket is to be gathered this way; the same on all ranks."""
    if layout.is_rank_major or not layout.is_regular or layout.gather_dtype not in WIRE_DTYPES:
        return False
    return layout.sends_padded and layout.full_bytes >= LARGE_BYTES * len(layout.params)


def reduce_pays(layout: ReduceLayout) -> bool:
    """The same for gradients, which must have the dtype of the sum, and no padding."""
    if not layout.is_regular or any(p.is_padded for p in layout.params):
        return False
    large = sum(p.numel for p in layout.params) * layout.dtype.itemsize
    is_cast = layout.dtype != layout.bucket.gather_dtype
    return layout.sends_padded and not is_cast and large >= LARGE_BYTES * len(layout.params)


class InPlaceGather:
    """The views of a bucket that is gathered so; `own`: this rank's chunk in the gather dtype, over
    memory that comes and goes, where shards are stored in another one.
    """

    __slots__ = ("_shard", "out", "own", "parts", "wholes")

    def __init__(self, layout: BucketLayout, shard: torch.Tensor, out: torch.Tensor) -> None:
        self._shard, self.out = shard, out
        casts = shard.dtype != out.dtype or shard.device != out.device
        self.own = Staging(layout.chunk_numel, out, None) if casts else None
        read = shard if self.own is None else self.own.packed
        self.parts: list[torch.Tensor] = []
        self.wholes: list[torch.Tensor] = []
        for param, at in zip(layout.params, layout.shard_offsets(0), strict=True):
            if space := param.full_space // layout.world:
                self.parts.append(read[at : at + space])
                end = param.full_offset + param.full_space
                self.wholes.append(out[param.full_offset : end])

    @property
    def num_views(self) -> int:
        return len(self.wholes)

    @classmethod
    def take(cls, bucket: C10dBucket, shard: torch.Tensor, out: torch.Tensor) -> InPlaceGather:
        """The bucket's own, unless it is in use, or was made for others."""
        known = bucket.gather_staging
        if type(known) is cls and known.out is out and known._shard is shard:
            if known.own is None:
                return known
            if known.own.is_free:
                known.own.take_again()
                return known
        made = cls(bucket.layout, shard, out)
        if shard is bucket.buffer:
            keep_from_second(bucket, made, out)
        return made

    def fill(self) -> None:
        if self.own is not None:
            self.own.packed.copy_(self._shard[: self.own.packed.numel()], non_blocking=True)

    def give_back(self) -> None:
        if self.own is not None:
            self.own.give_back()


class GradsInPlace:
    """A GradBuffer that holds the gradients until they are reduced where they are."""

    __slots__ = ("_arrived", "_bucket", "_held", "_like", "_pre_scale", "plan")

    def __init__(
        self, bucket: C10dBucket, plan: ReducePlan, out: torch.Tensor, pre_scale: float
    ) -> None:
        self._bucket, self.plan, self._like, self._pre_scale = bucket, plan, out, pre_scale
        self._held: dict[int, torch.Tensor] = {}
        self._arrived = [False] * len(plan.layout.indices)

    def put(self, index: int, grad: torch.Tensor) -> None:
        grad = grad.detach() if grad.requires_grad else grad
        if self._pre_scale != 1.0:
            grad = grad * self._pre_scale
        if (before := self._held.get(index)) is not None:
            grad = before + grad
        self._held[index] = grad
        self._arrived[index] = True

    @property
    def had(self) -> tuple[bool, ...]:
        return tuple(self._arrived)

    def discard(self) -> None:
        self._held = {}

    def pack(self) -> None:
        """As collectives want them; one that has not arrived is zeros."""
        layout, held = self.plan.layout, self._held
        for index, param in enumerate(layout.params):
            grad = held.get(index)
            if grad is None:
                grad = self._like.new_zeros(param.spec.shape)
            if grad.dtype != layout.dtype or not grad.is_contiguous():
                grad = grad.to(layout.dtype).contiguous()
            held[index] = grad

    def take(self, out: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Gradients and counts, and where their sums go in `out`."""
        self.pack()
        layout = self.plan.layout
        held, self._held = self._held, {}
        read = [held[index].view(-1) for index in range(len(layout.params))]
        written = [
            out[at : at + param.numel // layout.world]
            for param, at in zip(layout.params, layout.offsets(0), strict=True)
        ]
        return [*read, self._counts()], [*written, out[layout.largest_numel :]]

    def _counts(self) -> torch.Tensor:
        """For each rank and parameter, behind the gap up to where they lie: replicas are sent that
        too, so something is to be written to it.
        """
        layout = self.plan.layout
        gap = layout.counts_offset - layout.largest_numel
        counts = self._like.new_ones(layout.world, gap + len(self._arrived))
        for index, arrived in enumerate(self._arrived):
            if not arrived:
                counts[:, gap + index].zero_()
        return counts.view(-1)

    def packed(self) -> tuple[PackedGrads, list[torch.Tensor]]:
        """The same in rank-major order, for sums that are taken in an order of their own, and what
        is to be kept until they are: a lane copies from it.
        """
        grads = PackedGrads(self._bucket, self.plan, self._like, 1.0)
        held, self._held = self._held, {}
        for index, grad in held.items():
            if self._arrived[index]:
                grads.put(index, grad)
        return grads, list(held.values())
