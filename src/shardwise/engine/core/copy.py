"""The gathered copy of a unit: what state it is in, and the holds on it.

    there       memory is filled, or gathers that fill it are on their way
    current     this rank has not written to its shards since
    stale       some rank has: the next forward gathers again. Backwards never do, they use the
                copy that their forward used

Whoever needs the copy takes a hold by the reason: `take` and `drop` from outside, the kernel writes
the bits. They are not counted: each reason has one holder. When a forward or a backward is
over, its own holds go, and the unit settles: memory goes when no hold is left. While a hold of use
is taken, modules show full parameters; holds of memory leave shards in their place. A write to the
shards, `reshard()` and a new layout end every copy, whoever holds it.

    of use      BACKWARD  from the first sign of the unit's backward, until that is over
                GRAPH     create_graph: the graph under construction saves full parameters
                UNSEEN    no hook reaches what the last forward returned
                USER      `unshard()`, until `reshard()`, the next forward with gradients, or the
                          end of a backward
                PASS      the strategy, or a setting, keeps it between passes
    of memory   WISH      forwards without gradients find it again: the user has asked to keep it
                CLEAN     the strategy keeps it until somebody writes to the shards
                OTHERS    and above: for whoever comes from outside of the kernel

A forward that runs, of the unit or of one that borrows its parameters, is counted by the unit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from shardwise._torch_compat import graph_task_id, outside_transforms
from shardwise.comm.streams import Streams
from shardwise.comm.transport import DONE, Handle
from shardwise.engine.core.bucket import BucketState
from shardwise.engine.tensor.shard_tensor import Mark

BACKWARD, GRAPH, UNSEEN, USER, PASS = 1, 2, 4, 8, 16
USE = BACKWARD | GRAPH | UNSEEN | USER | PASS
WISH, CLEAN, OTHERS = 32, 64, 128
PASSING = USE | WISH  # that a pass takes, and its end drops


class FullCopy:
    """See the module docstring."""

    __slots__ = (
        *("_mark", "buckets", "event", "handles", "holds", "is_awaited", "is_stale", "is_there"),
        *("shows_shards", "streams", "version", "when_shown"),
    )

    def __init__(self, mark: Mark, streams: Streams) -> None:
        self._mark, self.streams = mark, streams
        self.buckets: list[BucketState] = []  # set by the unit, which may be laid out anew
        self.holds = 0
        self.is_there = self.is_stale = False
        self.version = -1  # the mark's count when it was gathered
        self.shows_shards = True  # and modules hold nothing else
        self.when_shown: list[Callable[[], None]] = []  # modules hold another form now
        self.handles: Sequence[Handle] = ()
        self.event: Any = None  # behind the gather; each use waits for it, on its own stream
        self.is_awaited = True  # by one at least

    @property
    def is_current(self) -> bool:
        return self.version == self._mark.count

    @property
    def needs_gather(self) -> bool:
        """None is there, or one that was written since; a backward takes that of its forward."""
        if self.is_there and not self.is_stale and self.version == self._mark.count:
            return False
        return not self.is_there or graph_task_id() == -1

    def take(self, hold: int) -> None:
        self.holds |= hold

    def drop(self, hold: int) -> None:
        """The memory goes when the unit settles next (`Unit.settle`)."""
        self.holds &= ~hold

    # -- gathering -------------------------------------------------------------------------------
    def issue(self, gather: Callable[[], Sequence[Handle]]) -> None:
        """Issue the gathers. `wait` must follow before use."""
        if self.is_there:
            self.wait()
        if self.streams.is_async:
            with self.streams.lane("gather"):
                self.handles = outside_transforms(gather)
                self._wait_handles()  # the lane waits, not the host: copy-out overlaps too
            self.event, self.is_awaited = self.streams.record("gather"), False
        else:
            self.handles = outside_transforms(gather)
        self.is_there, self.is_stale = True, False
        self.version = self._mark.count

    def wait(self) -> None:
        """From here on the compute stream may read the full parameters."""
        if self.handles:
            self._wait_handles()
        if self.event is not None:
            self.is_awaited = True
            self.streams.wait(self.event)

    def _wait_handles(self) -> None:
        try:
            outside_transforms(self._wait_each)
        except BaseException:
            # The gather may still write, so its memory is not released; nobody waits for it again.
            self.is_there = False
            raise

    def _wait_each(self) -> None:
        handles, self.handles = self.handles, ()
        for handle in handles:
            if handle is not DONE:
                handle.wait()
        for bucket in self.buckets:
            bucket.count_uses_behind_gather()

    # -- showing, releasing ----------------------------------------------------------------------
    def show_full(self) -> None:
        self.shows_shards = False
        for bucket in self.buckets:
            bucket.register_full()
        for tell in self.when_shown:
            tell()

    def show_shards(self) -> None:
        self.shows_shards = True
        for bucket in self.buckets:
            bucket.register_sharded()
        for tell in self.when_shown:
            tell()

    def show_between(self) -> None:
        """Shards over a smaller world, see `stages.Part`."""
        self.shows_shards = False
        for bucket in self.buckets:
            bucket.register_between()
        for tell in self.when_shown:
            tell()

    def release(self, after: str = "") -> None:
        """Give the memory back; `after`: see `BucketState.release`."""
        if self.handles or not self.is_awaited:
            self.wait()
        for bucket in self.buckets:
            bucket.release(after)
        if self.streams.is_async:
            self.streams.mark()  # the memory serves others, behind what has read it
            self.event = None
        self.is_there = False

    def __del__(self) -> None:
        """A gather is on its way: shards and full parameters, whose memory goes with this, come
        behind it.
        """
        if not getattr(self, "is_awaited", True) and not sys.is_finalizing():
            self.streams.wait(self.event)
