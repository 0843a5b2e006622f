"""Shared memory that steps aside while somebody watches collectives (`watch.py`).

One decision a phase, the same on all ranks: each rank says when it enters whether it is watched,
and after the entry fence all know whether anybody is. In such a phase gathers and reductions go
over process groups, from and to the same buffers, so a counter counts what is really sent and a
replaced function is really used. The next phase without a watcher is shared memory again.

What holds on c10d holds in a watched phase: all ranks must run the same units in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from shardwise.comm.c10d.bucket import C10dBucket
from shardwise.comm.c10d.transport import C10dTransport
from shardwise.comm.shared_memory import SharedMemoryTransport
from shardwise.comm.shared_memory.gather import SharedBucket
from shardwise.comm.transport import Axis, Position
from shardwise.comm.watch import is_watched


def _either_way(method: str, axis: str = "") -> Callable[..., Any]:
    """A method of both transports; what moves over an axis of one rank is nobody's to see."""
    shared = getattr(SharedMemoryTransport, method)

    def move(self: WatchedTransport, bucket: SharedBucket, *args: Any) -> Any:
        is_moved = not axis or getattr(bucket, axis).size > 1
        beside = self._visible(bucket) if is_moved else None
        if beside is None:
            return shared(self, bucket, *args)
        return getattr(self._c10d, method)(beside, *args)

    return move


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

    gather = _either_way("gather", "shard")
    grad_buffer = _either_way("grad_buffer")
    reduce = _either_way("reduce")
    collect = _either_way("collect")
    all_reduce = _either_way("all_reduce", "replicate")
    complete = _either_way("complete", "replicate")

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
