"""A board beside the data path: ranks of all hosts tell each other where they are, through the
store of the process group.

    shardwise/where/<rank>    what a rank has been waiting for, for longer than STALL_S

Written only by ranks that wait long, read only by those that have to explain a wait: the usual step
does neither. The store is a process too (rank 0's, or torchrun's), which may be stopped or gone, so
answers are waited for with a limit, by a thread that may be left behind.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise._torch_compat import default_store
from shardwise.comm.kept import kept
from shardwise.comm.limits import wait_limit_s, warn_after_s
from shardwise.comm.transport import Position
from shardwise.errors import PeerTimeoutError

logger = logging.getLogger(__name__)

STALL_S = 2.0  # a wait this long is told to the others
ANSWER_S = 5.0  # a store that takes longer is stopped or gone
_NOTHING = "?"
_SHOWN = 64  # ranks in one text


_Questions = queue.SimpleQueue[tuple[Callable[[], Any], Any] | None]


class Board:
    """The store, asked with a limit."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.in_phase: dict[Any, None] = {}  # the order checks of this rank in which a phase is on
        self._questions: _Questions | None = None

    def set(self, key: str, text: str) -> None:
        """Does not wait for an answer."""
        self._store.set(key, text)

    def find(self, key: str) -> str | None:
        """None when nobody has written there."""
        # `check` and `get` in one message: it writes nothing, since no key holds this text.
        ask = self._store.compare_set
        found = self._ask(lambda: ask(key, _NOTHING, _NOTHING).decode())
        return None if found == _NOTHING else found

    def get(self, key: str) -> str:
        """What is there; raises when nothing comes within the limit."""
        return self._ask(lambda: self._store.get(key).decode())

    def forget(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def close(self) -> None:
        """Nobody asks any more: its thread ends."""
        if self._questions is not None:
            self._questions.put(None)
            self._questions = None

    def _ask(self, question: Callable[[], Any]) -> Any:
        if self._questions is None:
            self._questions = queue.SimpleQueue()
            threading.Thread(
                target=_answer, args=(self._questions,), daemon=True, name="shardwise-store"
            ).start()
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._questions.put((question, answers))
        try:
            answer = answers.get(timeout=ANSWER_S)
        except queue.Empty:
            self._questions = None  # its thread is stuck; the next question gets a new one
            raise PeerTimeoutError(
                f"the store of the process group has not answered for {ANSWER_S:g} s: the process "
                "that holds it (rank 0, or torchrun's agent) is stopped, gone, or out of reach. "
                "Look at that process and its log"
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _answer(questions: _Questions) -> None:
    while (asked := questions.get()) is not None:
        question, answers = asked
        try:
            answers.put(question())
        except Exception as error:  # noqa: BLE001 - it is raised by whoever asked
            answers.put(error)


def default_board() -> Board | None:
    """The board of the default process group; None without one (or with the fake one)."""
    store = default_store()
    if store is None:
        return None
    boards = kept("boards")
    board: Board | None = boards.get("default")
    if board is None or board._store is not store:
        board = boards["default"] = Board(store)
    return board


def text_of(position: Position | None) -> str:
    """Where a rank is, in words."""
    if position is None:
        return "outside of a step"
    unit = f", unit {position.unit!r}" if position.unit else ""
    return f"step {position.step}, {position.phase}{unit}"


def post_whereabouts(board: Board, text: str) -> None:
    board.set(f"shardwise/where/{dist.get_rank()}", text)


def clear_whereabouts(board: Board) -> None:
    board.set(f"shardwise/where/{dist.get_rank()}", "")


def whereabouts(board: Board, ranks: Iterable[int]) -> list[str]:
    """One line for each rank: what it waits for, if it does."""
    lines = []
    ranks = list(ranks)
    for rank in ranks[:_SHOWN]:
        at = board.find(f"shardwise/where/{rank}")
        quiet = "waits for nobody: in user code, stopped, or ended"
        lines.append(f"  rank {rank}: {at or quiet}")
    if len(ranks) > _SHOWN:
        lines.append(f"  ... and {len(ranks) - _SHOWN} more ranks")
    return lines


def all_ranks() -> range:
    return range(dist.get_world_size())


def explain(what: str, position: Position | None, waited_s: float) -> str:
    """The text of a wait that took long."""
    board, own = default_board(), dist.get_rank()
    head = f"rank {own} ({text_of(position)}) has waited {waited_s:.0f} s for {what}"
    return head if board is None else "\n".join([head, *whereabouts(board, all_ranks())])


def wait_for(work: Any, what: str, position: Position | None = None) -> None:
    """Wait for a collective on the host. A long wait is told to the others, then logged, and an
    error at the limit.
    """
    board, began, has_told, warned = default_board(), time.monotonic(), False, False
    while True:
        try:
            work.wait(timedelta(seconds=min(STALL_S, wait_limit_s())))
            break
        except RuntimeError as error:
            waited = time.monotonic() - began
            if board is None or work.is_completed() or waited < 0.9 * min(STALL_S, wait_limit_s()):
                raise
            has_told = True
            post_whereabouts(board, f"{text_of(position)}, waits for {what}")
            if waited > wait_limit_s():
                raise PeerTimeoutError(
                    explain(what, position, waited) + "\nAll ranks must make the same calls. If "
                    "one may really take longer, raise the limit: shardwise.set_wait_limit()"
                ) from error
            if waited > warn_after_s() and not warned:
                warned = True
                logger.warning("%s", explain(what, position, waited))
    if has_told and board is not None:
        clear_whereabouts(board)


def all_reduce(tensor: Any, op: Any, group: Any, what: str) -> None:
    """`dist.all_reduce` in place. On the host the wait is bounded, told and logged like others; on
    an accelerator it is the stream that waits, up to the process group's timeout."""
    on_host = tensor.device.type == "cpu"
    work = dist.all_reduce(tensor, op, group, async_op=on_host)
    if on_host and work is not None:
        wait_for(work, what)
