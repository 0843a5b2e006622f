"""A transport that moves nothing between ranks and records what would have moved.

For planners, tests and dry runs: it needs no process group, so one process can play any rank of
1,024. What this rank holds goes where it belongs, peers contribute zeros: a gather fills the own
rows and zeroes the others, a reduction yields the own gradient times the scale. Every tensor of
the engine has its real size.

`record` lists, in order, what a transport with one collective per bucket issues; sizes are what
one rank puts in, as in `UnitLayout.collectives`. An axis of size 1 leaves no entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.comm.c10d.bucket import C10dBucket
from shardwise.comm.c10d.packed_grads import PackedGrads, ReducePlan
from shardwise.comm.transport import DONE, Axis, GradBuffer, Handle, Position, Transport
from shardwise.layout import BucketLayout, ReduceLayout


@dataclass(frozen=True, slots=True)
class Recorded:
    """One collective that was not issued."""

    kind: str  # "gather" | "reduce" | "all_reduce" | "agree"
    bucket: str
    size_bytes: int


class FakeTransport(Transport[C10dBucket]):
    """Records instead of communicating; see the module's docstring."""

    name = "fake"
    takes_bytes = True
    has_peers = False

    def __init__(self, shard: Axis, replicate: Axis) -> None:
        self._shard = shard
        self._replicate = replicate
        self.record: list[Recorded] = []

    def attach(self, name: str, layout: BucketLayout, device: torch.device) -> C10dBucket:
        self._shard.check(name, layout.world)
        buffer = torch.zeros(layout.chunk_numel, dtype=layout.dtype, device=device)
        return C10dBucket(name, layout, self._shard, self._replicate, buffer)

    def gather(self, bucket: C10dBucket, shard: torch.Tensor, out: torch.Tensor) -> Handle:
        layout, rank = bucket.layout, bucket.shard.rank
        if bucket.shard.size == 1:
            if shard.data_ptr() != out.data_ptr():
                out.copy_(shard)
            return DONE
        if not out.numel():
            return DONE
        size_bytes = layout.chunk_numel * layout.gather_dtype.itemsize
        self.record.append(Recorded("gather", bucket.name, size_bytes))
        out.zero_()
        for param, at in zip(layout.params, layout.shard_offsets(rank), strict=True):
            whole = out[param.full_offset : param.full_offset + param.numel]
            own = param.rows_of(whole.view(param.spec.shape), rank)
            own.copy_(shard[at : at + own.numel()].view(own.shape))
        return DONE

    def grad_buffer(
        self, bucket: C10dBucket, layout: ReduceLayout, out: torch.Tensor, pre_scale: float = 1.0
    ) -> GradBuffer:
        return PackedGrads(bucket, ReducePlan.of(bucket, layout), out, pre_scale)

    def reduce(
        self, bucket: C10dBucket, grads: GradBuffer, out: torch.Tensor, scale: float
    ) -> Handle:
        assert isinstance(grads, PackedGrads), f"{type(grads).__name__} is not of this transport"
        plan, staging = grads.plan, grads.finish()
        if bucket.shard.size > 1:
            if plan.padded:
                out.copy_(plan.packing.chunk(staging.packed, bucket.shard.rank))
            else:
                plan.unpack_own(staging.packed, out)
            staging.give_back()
            if out.numel():
                size_bytes = plan.layout.packed_numel * out.dtype.itemsize
                self.record.append(Recorded("reduce", bucket.name, size_bytes))
        out.mul_(scale)
        return DONE

    def all_reduce(self, bucket: C10dBucket, out: torch.Tensor) -> Handle:
        if bucket.replicate.size > 1 and out.numel():
            size_bytes = out.numel() * out.dtype.itemsize
            self.record.append(Recorded("all_reduce", bucket.name, size_bytes))
        return DONE

    def enter(self, position: Position) -> None:
        """Nobody to wait for."""

    def leave(self, position: Position) -> None:
        """Nobody to wait for."""

    def abandon(self) -> None:
        """Nothing is in flight."""

    def agree(self, flags: list[bool]) -> list[bool]:
        """The own flags: peers are taken to say False."""
        for axis in (self._shard, self._replicate):
            if axis.size > 1 and flags:
                self.record.append(Recorded("agree", axis.name, len(flags)))
        return list(flags)

    def close(self) -> None:
        """Nothing to give back; the record stays."""
