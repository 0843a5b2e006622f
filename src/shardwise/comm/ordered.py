"""Ordered transports: all ranks issue the same collectives in the same order.

Ordered   what these have in common: the order check of both axes, waits with a limit, errors
          that say where a rank stood
Issued    the handle of what was issued: waits for its works, then does what is left
Guarded   the same around a transport of the user's own, and what that need not have
"""

from __future__ import annotations

import queue
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from shardwise.comm.aside import Answer, Aside
from shardwise.comm.board import ended_ranks
from shardwise.comm.order import OrderCheck
from shardwise.comm.streams import streams_for
from shardwise.comm.transport import (
    Axis,
    B,
    Bucket,
    GradBuffer,
    Handle,
    Missing,
    Position,
    Transport,
)
from shardwise.errors import DivergenceError, PeerTimeoutError, TransportError
from shardwise.layout import BucketLayout, ReduceLayout

_CAPABILITIES = (
    *("reads_at_any_time", "takes_custom_collectives", "sums_in_tree", "takes_bytes"),
    *("takes_wires", "has_peers", "sums_late"),
)


class Ordered(Transport[B]):
    """See the module's docstring. Who issues a collective tells the checks first (`note`)."""

    checks_order = True

    def __init__(self, shard: Axis, replicate: Axis, device: torch.device) -> None:
        """`device`: the one that computes. Buffers may lie on the host all the same."""
        self._device = device
        self._streams = streams_for(device)
        self._shard, self._replicate = shard, replicate
        self._position: Position | None = None
        checks = (OrderCheck.of(axis) for axis in (shard, replicate))
        self._checks = [check for check in checks if check is not None]

    def enter(self, position: Position) -> None:
        self._position = position
        for check in self._checks:
            check.begin_phase(position)

    def leave(self, position: Position) -> None:
        self._position = position
        for check in self._checks:
            check.end_phase(position)

    def abandon(self) -> None:
        """Collectives in flight end by themselves: their works hold the buffers."""
        error = sys.exc_info()[1]
        reason = (
            "an exception; read its log" if error is None else f"{type(error).__name__}: {error}"
        )
        for check in self._checks:
            check.abandon(reason[:2000])

    def wait_for(self, work: Any, what: str, *, on_host: bool = False) -> None:
        """Wait on the host where that is what the backend does anyway, and watch the time."""
        if self._checks and (on_host or not self._streams.is_async):
            self._checks[-1 if what.startswith("all_reduce") else 0].wait(work, what)
        else:
            work.wait()

    def failure(self, what: str, error: Exception) -> TransportError:
        """The error of a collective, with where this rank stood."""
        at = self._position
        where = at.text if at else "outside of a step"
        own = self._shard.ranks[self._shard.rank]
        ranks = {rank for axis in (self._shard, self._replicate) for rank in axis.ranks}
        return TransportError(
            f"{self.name}: {what} failed on rank {own} ({where}): {error}\n"
            f"{ended_ranks(sorted(ranks))}"
        )


class Issued:
    """Works that were issued; once all are complete, `then` is called and `keeps` let go of."""

    __slots__ = ("_bucket", "_keeps", "_then", "_transport", "_what", "_works")

    def __init__(
        self,
        transport: Ordered[Any],
        bucket: Bucket,
        works: list[Any],
        what: str,
        then: Callable[[], None] | None = None,
        keeps: Any = None,
    ) -> None:
        self._transport, self._bucket, self._what = transport, bucket, what
        self._works: list[Any] | None = works  # None: waited for
        self._then, self._keeps = then, keeps

    def wait(self) -> None:
        works = self._works
        if works is None:
            return
        transport = self._transport
        try:
            for work in works:
                transport.wait_for(work, f"{self._what} of {self._bucket.name}")
        except (PeerTimeoutError, DivergenceError):
            raise
        except RuntimeError as error:
            raise transport.failure(f"{self._what} of {self._bucket.name}", error) from error
        self._works = None
        then, self._then = self._then, None
        if then is not None:
            then()
        self._keeps = None


def _noted(method: str, axis: str, text: str = "") -> Callable[..., Any]:
    """A method of a guarded transport that moves something over `axis`."""
    what = text or method

    def move(self: Guarded, bucket: Bucket, *args: Any) -> Handle:
        call = getattr(self._own, method)
        if not self._checks or getattr(bucket, axis).size == 1:
            return call(bucket, *args)
        members = "" if method == "gather" else self._members.get(bucket, "")
        for check in self._checks:
            check.note(what, bucket.name, bucket.number, members)
        try:
            handle = call(bucket, *args)
        except RuntimeError as error:
            raise self.failure(f"{what} of {bucket.name}", error) from error
        return Issued(self, bucket, [_Work(self._aside, handle.wait)], what)

    return move


class Guarded(Ordered[Bucket]):
    """A transport of the user's own. `gather`, `reduce` and `all_reduce` of an ordered one should
    issue and return: a wait of its handle is bounded, one inside of the call is not.
    """

    def __init__(self, own: Any, shard: Axis, replicate: Axis, device: torch.device) -> None:
        super().__init__(shard, replicate, device)
        self._own, self.name = own, own.name
        self.is_ordered = getattr(own, "is_ordered", not hasattr(own, "missing"))
        for name in _CAPABILITIES:
            setattr(self, name, getattr(own, name, getattr(Transport, name)))
        if not (self.is_ordered and self.has_peers):
            self._checks = []
        self._aside = Aside("shardwise-wait")
        self._members: weakref.WeakKeyDictionary[Bucket, str] = weakref.WeakKeyDictionary()
        self._num_attached = 0

    def attach(self, name: str, layout: BucketLayout, device: torch.device) -> Bucket:
        bucket = self._own.attach(name, layout, device)
        self._num_attached += 1
        bucket.number = self._num_attached
        return bucket

    def grad_buffer(
        self, bucket: Bucket, layout: ReduceLayout, out: torch.Tensor, pre_scale: float = 1.0
    ) -> GradBuffer:
        self._members[bucket] = layout.members
        return self._own.grad_buffer(bucket, layout, out, pre_scale)

    gather = _noted("gather", "shard")
    reduce = _noted("reduce", "shard")
    all_reduce = _noted("all_reduce", "replicate")
    collect = _noted("collect", "shard", "tree reduction")
    complete = _noted("complete", "replicate", "all_reduce in tree order")

    def enter(self, position: Position) -> None:
        super().enter(position)
        self._own.enter(position)

    def leave(self, position: Position) -> None:
        self._own.leave(position)
        super().leave(position)

    def give_up(self) -> None:
        getattr(self._own, "give_up", lambda: None)()

    def abandon(self) -> None:
        super().abandon()
        self._own.abandon()

    def agree(self, flags: list[bool]) -> list[bool]:
        if not self._checks or not flags:
            return self._own.agree(flags)
        for check in self._checks:
            check.note("agreement", f"{len(flags)} flags", len(flags))
        agreed: list[bool] = []
        work = _Work(self._aside, lambda: agreed.extend(self._own.agree(flags)))
        self.wait_for(work, "all_reduce of what ranks agree on")
        return agreed

    def wait_for(self, work: Any, what: str, *, on_host: bool = False) -> None:
        try:
            super().wait_for(work, what, on_host=on_host)
        except (PeerTimeoutError, DivergenceError):
            self._aside.leave()  # it waits on
            raise

    def missing(self, position: Position) -> list[Missing]:
        return [] if self.is_ordered else self._own.missing(position)

    def close(self) -> None:
        self._aside.leave()
        self._own.close()


class _Work:
    """A wait of somebody else's that has no limit of its own, as a work that takes one."""

    def __init__(self, aside: Aside, wait: Callable[[], Any]) -> None:
        self._aside, self._wait = aside, wait
        self._answer: Answer | None = None
        self._found: Any = _Work  # what came of it; this class: nothing yet

    def wait(self, limit: timedelta | None = None) -> None:
        if limit is None:
            self._wait()
            return
        if self._answer is None:
            self._answer = self._aside.ask(self._wait)
        if not self.is_completed():
            try:
                self._found = self._answer.get(timeout=limit.total_seconds())
            except queue.Empty:
                raise RuntimeError("not yet") from None
        if isinstance(self._found, BaseException):
            raise self._found

    def is_completed(self) -> bool:
        return self._found is not _Work
