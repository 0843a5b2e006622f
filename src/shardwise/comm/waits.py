"""Waits for other ranks. Each is told to the others, then logged, then an error, and says where
every rank is.

    after STALL_S          the board shows what this rank waits for
    after warn_after_s()   it is logged, and again each time it has taken twice as long
    at wait_limit_s()      PeerTimeoutError; sooner once a rank that is waited for has ended

`Wait` holds that for all ways of waiting: a collective in slices (`in_slices`), a look at the store
(`order`), a futex (`shared_memory.domain`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise.comm.board import (
    ANSWER_S,
    STALL_S,
    Board,
    check_lives,
    clear_whereabouts,
    default_board,
    post_whereabouts,
    text_of,
    whereabouts,
)
from shardwise.comm.limits import LIMIT_VARIABLE, START_AGAIN, wait_limit_s, warn_after_s
from shardwise.comm.transport import Position, how_to_differ
from shardwise.errors import DivergenceError, PeerTimeoutError, TransportError

logger = logging.getLogger(__name__)

_BUSY = "at work: "


class Wait:
    """One wait that takes long; `look` is called from time to time."""

    remedy = "All ranks must make the same calls"

    def __init__(
        self,
        what: str,
        position: Position | None = None,
        ranks: Iterable[int] = (),
        limit_s: float | None = None,
    ) -> None:
        self._what, self._position, self._ranks = what, position, ranks
        self._board = default_board()  # of this thread
        self._limit_s = limit_s or wait_limit_s()
        self._look_at, self._warn_at = min(STALL_S, self._limit_s), warn_after_s()
        self._has_told = False

    def tell(self) -> None:
        if self._board is not None:
            post_whereabouts(self._board, f"{text_of(self._position)}, waits for {self._what}")

    def check(self, waited_s: float) -> None:
        """Raise what makes it vain to wait on."""
        if self._board is not None:
            check_lives(self._board, self._ranks, self._what)

    def describe(self, waited_s: float) -> str:
        if self._board is None:
            return f"waited {waited_s:.0f} s for {self._what}"
        at = f"rank {dist.get_rank()} ({text_of(self._position)})"
        head = f"{at} has waited {waited_s:.0f} s for {self._what}"
        return "\n".join([head, *whereabouts(self._board, range(dist.get_world_size()))])

    def is_over(self) -> bool:
        """Behind the limit: nothing speaks for waiting on."""
        return True

    def look(self, waited_s: float) -> None:
        if waited_s < self._look_at:
            return
        self._look_at = min(waited_s + STALL_S / 2, max(waited_s, self._limit_s))
        if not self._has_told:
            self._has_told = True
            self.tell()
        self.check(waited_s)
        if waited_s > self._limit_s and self.is_over():
            raise PeerTimeoutError(
                f"{self.describe(waited_s)}\n{self.remedy}. If one may really take longer, raise "
                f"{LIMIT_VARIABLE} (now {self._limit_s:g} s) or call shardwise.set_wait_limit()."
                + how_to_differ(self._position)
                + START_AGAIN
            )
        if waited_s > self._warn_at:
            self._warn_at = waited_s * 2
            logger.warning("%s", self.describe(waited_s))

    def over(self) -> None:
        if self._has_told and self._board is not None:
            clear_whereabouts(self._board)


def in_slices(work: Any, make: Callable[[], Wait]) -> None:
    """Wait for a collective on the host; `make`: a wait that takes long begins."""
    wait: Wait | None = None
    began = time.monotonic()
    slice_s = min(STALL_S, wait_limit_s())
    while True:
        try:
            work.wait(timedelta(seconds=slice_s))
            break
        except RuntimeError as error:
            waited = time.monotonic() - began
            if work.is_completed():  # it failed, or came when this slice was over
                work.wait(timedelta(seconds=slice_s))
                break
            if waited < 0.9 * slice_s:
                raise
            wait = wait or make()
            try:
                wait.look(max(waited, STALL_S))
            except (DivergenceError, PeerTimeoutError) as found:
                raise found from error
    if wait is not None:
        wait.over()


def wait_for(
    work: Any,
    what: str,
    *,
    ranks: Iterable[int] = (),
    heeds_work: bool = False,
    limit_s: float | None = None,
) -> None:
    """Wait for a collective on the host, at most until one of `ranks` has ended. With `heeds_work`
    a rank that says that it is busy (`AtWork`) is waited for however long it takes. `limit_s`: by
    default the one for all waits.
    """
    if default_board() is None:
        work.wait()
    else:
        kind = _WaitForWork if heeds_work else Wait
        in_slices(work, lambda: kind(what, ranks=ranks, limit_s=limit_s))


class _WaitForWork(Wait):
    """Ranks may be busy for long."""

    _said: dict[int, str] = {}  # noqa: RUF012 - replaced, never written to
    _says_less = _was_over = False  # who has just ended its work gets one more slice to come

    def check(self, waited_s: float) -> None:
        super().check(waited_s)
        assert self._board is not None
        before, self._said = self._said, busy_ranks(self._board, self._ranks)
        self._says_less = self._said.items() <= before.items()

    def is_over(self) -> bool:
        was_over, self._was_over = self._was_over, self._was_over or self._says_less
        return was_over and self._says_less


class Told:
    """Around a wait that cannot be cut into slices: told to the others and logged as others are.
    The thread ends with the wait: Python that ends while a thread is in the store aborts.
    """

    def __init__(self, what: str) -> None:
        self._what, self._over = what, threading.Event()

    def __enter__(self) -> None:
        wait = Wait(self._what, limit_s=math.inf)
        self._thread = threading.Thread(target=self._tell, args=(wait,), daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(ANSWER_S)

    def _tell(self, wait: Wait) -> None:
        began = time.monotonic()
        with contextlib.suppress(TransportError):
            while not self._over.wait(STALL_S):
                wait.look(time.monotonic() - began)
            wait.over()


class AtWork(Told):
    """Around what a rank does while others wait for it: from STALL_S on it tells them that it is at
    it, for as long as its process runs."""

    def _tell(self, wait: Wait) -> None:
        board, began = wait._board, time.monotonic()
        while board is not None and not self._over.wait(STALL_S):
            with contextlib.suppress(TransportError):
                post_whereabouts(
                    board, f"{_BUSY}{self._what}, for {time.monotonic() - began:.0f} s"
                )
        if board is not None and time.monotonic() - began > STALL_S:
            with contextlib.suppress(TransportError):
                clear_whereabouts(board)


def busy_ranks(board: Board, ranks: Iterable[int]) -> dict[int, str]:
    """What those say that are at work; whose process is stopped says the same for ever."""
    texts = {rank: board.find(f"shardwise/where/{rank}") or "" for rank in ranks}
    return {rank: text for rank, text in texts.items() if text.startswith(_BUSY)}
