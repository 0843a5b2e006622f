"""Shared memory that steps aside while somebody watches collectives (`watch.py`).

One decision a phase, the same on all ranks: each rank says when it enters whether it is watched,
and after the entry fence all know whether anybody is. In such a phase gathers and reductions go
over process groups, from and to the same buffers, so a counter counts what is really sent and a
replaced function is really used. The next phase without a watcher is shared memory again.

What holds on c10d holds in a watched phase: all ranks must run the same units in the same order.
"""

from __future__ import annotations

import weakref

import torch

from shardwise.comm.c10d.staging import C10dBucket, PackedGrads
from shardwise.comm.c10d.transport import C10dTransport
from shardwise.comm.shared_memory import SharedMemoryTransport
from shardwise.comm.shared_memory.gather import SharedBucket
from shardwise.comm.transport import Axis, GradBuffer, Handle, Position
from shardwise.comm.tree_sum import TreeSum
from shardwise.comm.watch import is_watched
from shardwise.layout import ReduceLayout


class WatchedTransport(SharedMemoryTransport):
    """See the module docstring."""

    def __init__(self, shard: Axis, replicate: Axis, mesh: tuple[Axis, Axis] | None = None) -> None:
        super().__init__(shard, replicate, mesh)
        self._c10d = C10dTransport(shard, replicate)
        # Over the same buffers; numbered by their place in the domain.
        self._beside: weakref.WeakKeyDictionary[SharedBucket, C10dBucket]
        self._beside = weakref.WeakKeyDictionary()

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

    def gather(self, bucket: SharedBucket, shard: torch.Tensor, out: torch.Tensor) -> Handle:
        beside = self._visible(bucket) if bucket.shard.size > 1 else None
        if beside is None:
            return super().gather(bucket, shard, out)
        return self._c10d.gather(beside, shard, out)

    def grad_buffer(
        self, bucket: SharedBucket, layout: ReduceLayout, out: torch.Tensor, pre_scale: float = 1.0
    ) -> GradBuffer:
        beside = self._visible(bucket)
        if beside is None:
            return super().grad_buffer(bucket, layout, out, pre_scale)
        return self._c10d.grad_buffer(beside, layout, out, pre_scale)

    def reduce(
        self, bucket: SharedBucket, grads: GradBuffer, out: torch.Tensor, scale: float
    ) -> Handle:
        if isinstance(grads, PackedGrads):
            return self._c10d.reduce(self._beside[bucket], grads, out, scale)
        return super().reduce(bucket, grads, out, scale)

    def all_reduce(self, bucket: SharedBucket, out: torch.Tensor) -> Handle:
        beside = self._visible(bucket) if bucket.replicate.size > 1 else None
        if beside is None:
            return super().all_reduce(bucket, out)
        return self._c10d.all_reduce(beside, out)

    def collect(
        self,
        bucket: SharedBucket,
        grads: GradBuffer,
        out: torch.Tensor,
        tree: TreeSum,
        leaves: tuple[int | None, ...],
    ) -> Handle:
        if isinstance(grads, PackedGrads):
            return self._c10d.collect(self._beside[bucket], grads, out, tree, leaves)
        return super().collect(bucket, grads, out, tree, leaves)

    def complete(self, bucket: SharedBucket, tree: TreeSum) -> Handle:
        beside = self._visible(bucket) if bucket.replicate.size > 1 else None
        return (
            super().complete(bucket, tree) if beside is None else self._c10d.complete(beside, tree)
        )

    def _visible(self, bucket: SharedBucket) -> C10dBucket | None:
        """What moves over process groups in a phase in which any rank is watched, else None."""
        self._domain.entry_fence()
        if not self._domain.is_watched:
            return None
        if self._c10d not in self._domain.over_groups:
            self._domain.over_groups.append(self._c10d)
            self._c10d.enter(self._domain.position)
        known = self._beside.get(bucket)
        if known is None:
            same = (bucket.name, bucket.layout, bucket.shard, bucket.replicate, bucket.buffer)
            known = self._beside[bucket] = C10dBucket(*same, number=bucket.key)
        return known
