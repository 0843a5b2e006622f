"""Shared memory that steps aside while somebody watches collectives (`watch.py`).

One decision a phase, the same on all ranks: each rank says when it enters whether it is watched,
and after the entry fence all know whether anybody is. In such a phase gathers and reductions go
over process groups, from and to the same buffers, so a counter counts what is really sent and a
replaced function is really used. The next phase without a watcher is shared memory again.

What holds on c10d holds in a watched phase: all ranks must run the same units in the same order.
"""

from __future__ import annotations

import torch

from shardwise.comm.c10d.staging import PackedGrads
from shardwise.comm.c10d.transport import C10dTransport
from shardwise.comm.shared_memory import SharedMemoryTransport
from shardwise.comm.transport import Bucket, GradBuffer, Handle, Position
from shardwise.comm.tree_sum import TreeSum
from shardwise.comm.watch import is_watched
from shardwise.layout import BucketLayout, ReduceLayout


class WatchedTransport(SharedMemoryTransport):
    """See the module docstring."""

    _c10d: C10dTransport | None = None

    def attach(self, name: str, layout: BucketLayout, device: torch.device) -> Bucket:
        bucket = super().attach(name, layout, device)
        bucket.private["number"] = bucket.private["shards"].key  # c10d tells buckets apart by it
        return bucket

    def enter(self, position: Position) -> None:
        self._domain.enter(position, is_watched=is_watched())

    def leave(self, position: Position) -> None:
        for c10d in self._domain.over_groups:
            c10d.leave(position)
        super().leave(position)

    def give_up(self) -> None:
        if self._domain.active:
            for c10d in self._domain.over_groups:
                c10d.abandon()
        super().give_up()

    def gather(self, bucket: Bucket, shard: torch.Tensor, out: torch.Tensor) -> Handle:
        c10d = self._visible() if bucket.layout.world > 1 else None
        if c10d is not None:
            return c10d.gather(bucket, shard, out)
        return super().gather(bucket, shard, out)

    def grad_buffer(
        self, bucket: Bucket, layout: ReduceLayout, out: torch.Tensor, pre_scale: float = 1.0
    ) -> GradBuffer:
        c10d = self._visible()
        if c10d is not None:
            return c10d.grad_buffer(bucket, layout, out, pre_scale)
        return super().grad_buffer(bucket, layout, out, pre_scale)

    def reduce(self, bucket: Bucket, grads: GradBuffer, out: torch.Tensor, scale: float) -> Handle:
        if isinstance(grads, PackedGrads):
            assert self._c10d is not None, "it has made the buffer"
            return self._c10d.reduce(bucket, grads, out, scale)
        return super().reduce(bucket, grads, out, scale)

    def all_reduce(self, bucket: Bucket, out: torch.Tensor) -> Handle:
        c10d = self._visible() if bucket.replicate.size > 1 else None
        if c10d is not None:
            return c10d.all_reduce(bucket, out)
        return super().all_reduce(bucket, out)

    def collect(
        self,
        bucket: Bucket,
        grads: GradBuffer,
        out: torch.Tensor,
        tree: TreeSum,
        leaves: tuple[int | None, ...],
    ) -> Handle:
        if isinstance(grads, PackedGrads):
            assert self._c10d is not None, "it has made the buffer"
            return self._c10d.collect(bucket, grads, out, tree, leaves)
        return super().collect(bucket, grads, out, tree, leaves)

    def complete(self, bucket: Bucket, tree: TreeSum) -> Handle:
        c10d = self._visible() if bucket.replicate.size > 1 else None
        return super().complete(bucket, tree) if c10d is None else c10d.complete(bucket, tree)

    def _visible(self) -> C10dTransport | None:
        """The way over process groups in a phase in which any rank is watched, else None."""
        self._domain.entry_fence()
        if not self._domain.is_watched:
            return None
        if self._c10d is None:
            self._c10d = C10dTransport(self._shard, self._replicate)
        if self._c10d not in self._domain.over_groups:
            self._domain.over_groups.append(self._c10d)
            self._c10d.enter(self._domain.position)
        return self._c10d
