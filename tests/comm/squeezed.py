"""A transport as a user would write one: int8 for parameters and bf16 for gradients on the wire.

It inherits nothing, checks no order and knows no limits: what it gets of those is shardwise's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.choose import Reach
from shardwise.comm.transport import DONE, Axis, Bucket, Handle, Position
from shardwise.layout import BucketLayout, Packing, ReduceLayout, pack_grads, pack_shards


@dataclass(slots=True, eq=False, kw_only=True)
class SqueezedBucket(Bucket):
    """With its plan, and how many bytes went over the wire for it."""

    packing: Packing
    sent_bytes: int = 0


class Later:
    """Works, and what follows them."""

    def __init__(self, works: list[Any], then: Callable[[], None]) -> None:
        self.works, self.then = works, then

    def wait(self) -> None:
        works, self.works = self.works, []
        for work in works:
            work.wait()
        if works:
            self.then()


class Grads:
    """Whole gradients, until they are reduced."""

    def __init__(self, layout: ReduceLayout, pre_scale: float) -> None:
        self.layout, self.pre_scale = layout, pre_scale
        self.whole: dict[int, torch.Tensor] = {}

    def put(self, index: int, grad: torch.Tensor) -> None:
        grad = grad.detach() * self.pre_scale
        self.whole[index] = self.whole[index] + grad if index in self.whole else grad

    @property
    def had(self) -> tuple[bool, ...]:
        return tuple(i in self.whole for i in range(len(self.layout.indices)))

    def discard(self) -> None:
        self.whole.clear()

    def packed(self) -> torch.Tensor:
        """A row for each rank, in bf16; the counts at its end."""
        layout = self.layout
        packing = pack_grads(layout, padded=True)
        rows = torch.zeros(layout.world, layout.chunk_numel)
        for index, grad in self.whole.items():
            for move in packing.moves[index]:
                move.packed(rows.view(-1)).copy_(move.whole(grad.contiguous()))
            rows[:, layout.counts_offset + index] = 1
        return rows.bfloat16()


class Squeezed:
    """See the module's docstring."""

    name = "squeezed"

    def __init__(self, shard: Axis, replicate: Axis) -> None:
        self.shard, self.replicate = shard, replicate
        self.buckets: list[SqueezedBucket] = []

    def attach(self, name: str, layout: BucketLayout, device: torch.device) -> SqueezedBucket:
        buffer = torch.zeros(layout.chunk_numel, dtype=layout.dtype)
        packing = pack_shards(layout, padded=True)
        axes = (self.shard, self.replicate)
        self.buckets.append(SqueezedBucket(name, layout, *axes, buffer, packing=packing))
        return self.buckets[-1]

    def gather(self, bucket: SqueezedBucket, shard: torch.Tensor, out: torch.Tensor) -> Handle:
        layout, world = bucket.layout, bucket.shard.size
        step = shard.abs().max().clamp(min=1e-12) / 127
        own = torch.empty(4 + layout.chunk_numel, dtype=torch.int8)
        own[:4] = step.view(1).view(torch.int8)
        own[4:] = (shard / step).round().to(torch.int8)
        everybody = own.new_empty(world, own.numel())
        bucket.sent_bytes += own.numel()
        work = dist.all_gather_into_tensor(
            everybody.view(-1), own, group=bucket.shard.group, async_op=True
        )

        def unpack() -> None:
            steps = everybody[:, :4].contiguous().view(torch.float32)
            rows = (everybody[:, 4:].float() * steps).view(-1)
            for param, moves in zip(layout.params, bucket.packing.moves, strict=True):
                for move in moves:
                    move.whole(out, param.full_offset).copy_(move.packed(rows))

        return Later([work], unpack)

    def grad_buffer(
        self,
        bucket: SqueezedBucket,
        layout: ReduceLayout,
        out: torch.Tensor,
        pre_scale: float = 1.0,
    ) -> Grads:
        return Grads(layout, pre_scale)

    def reduce(
        self, bucket: SqueezedBucket, grads: Grads, out: torch.Tensor, scale: float
    ) -> Handle:
        sent = grads.packed()
        received = torch.empty_like(sent)
        bucket.sent_bytes += sent.nbytes
        work = dist.all_to_all_single(
            received.view(-1), sent.view(-1), group=bucket.shard.group, async_op=True
        )
        return Later([work], lambda: finish(received, out, scale))

    def all_reduce(self, bucket: SqueezedBucket, out: torch.Tensor) -> Handle:
        if bucket.replicate.size > 1:
            dist.all_reduce(out, group=bucket.replicate.group)
        return DONE

    def enter(self, position: Position) -> None:
        """Collectives need no fences."""

    def leave(self, position: Position) -> None:
        """Likewise."""

    def abandon(self) -> None:
        """Likewise."""

    def agree(self, flags: list[bool]) -> list[bool]:
        votes = torch.tensor(flags, dtype=torch.int32)
        for axis in (self.shard, self.replicate):
            if axis.size > 1:
                dist.all_reduce(votes, dist.ReduceOp.MAX, axis.group)
        return [bool(vote) for vote in votes.tolist()]

    def close(self) -> None:
        """Nothing to give back."""


def finish(received: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    torch.sum(received.float(), 0, out=out)
    out.mul_(scale)  # counts too: only "zero or not" is read from them


def open_squeezed(reach: Reach) -> Squeezed:
    return Squeezed(reach.shard, reach.replicate)
