"""A board beside the data path: ranks of all hosts tell each other where they are, through the
store of the process group.

    shardwise/where/<rank>    what a rank waits for, or is busy with, for longer than STALL_S
    shardwise/card/<rank>     which process it is (`liveness`)

Written only by ranks that wait long, read only by those that have to explain a wait: the usual step
does neither. The store is a process too (rank 0's, or torchrun's), which may be stopped or gone, so
answers are waited for with a limit, by a thread that may be left behind.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from shardwise._torch_compat import default_store
from shardwise.comm.aside import Aside
from shardwise.comm.kept import kept
from shardwise.comm.liveness import Process
from shardwise.comm.transport import Position
from shardwise.errors import PeerTimeoutError, TransportError

STALL_S = 2.0  # a wait this long is told to the others
ANSWER_S = 5.0  # a store that takes longer is stopped or gone
_ENDING_S = 1.0  # a process that is killed closes its sockets before it counts as ended
_NOTHING = "?"
_SHOWN = 64  # ranks in one text
_TROUBLES = {"ended": "has ended", "stopped": "is stopped, by a signal or a debugger"}


class Board:
    """The store, asked with a limit."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.in_phase: dict[Any, None] = {}  # the order checks of this rank in which a phase is on
        self.heard: tuple[int, str] | None = None  # the trouble of a rank, which ends a phase here
        self._processes: dict[int, Process] = {}
        self._aside = Aside("shardwise-store")

    def set(self, key: str, text: str) -> None:
        """Does not wait for an answer."""
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise self._lost(error) from error

    def find(self, key: str) -> str | None:
        """None when nobody has written there."""
        # `check` and `get` in one message: it writes nothing, since no key holds this text.
        ask = self._store.compare_set
        found = self._ask(lambda: ask(key, _NOTHING, _NOTHING).decode())
        return None if found == _NOTHING else found

    def get(self, key: str) -> str:
        """What is there; raises when nothing comes within the limit."""
        return self._ask(lambda: self._store.get(key).decode())

    def process_of(self, rank: int) -> Process | None:
        """None where it has shown no card yet."""
        if rank not in self._processes and (card := self.find(f"shardwise/card/{rank}")):
            self._processes[rank] = Process.of(card)
        return self._processes.get(rank)

    def _lost(self, error: BaseException) -> TransportError:
        """What a broken connection to the store means."""
        holder = "rank 0"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            holder = "torchrun's agent, or the launcher of the job"
        first = next(iter(str(error).splitlines()), type(error).__name__)
        known = sorted(self._processes.items())
        ended = [f"rank {r} (process {p.pid})" for r, p in known if p.state == "ended"]
        found = f". Ended: {', '.join(ended)}" if ended else ""
        return TransportError(
            f"the store of the process group is lost: the process that holds it ({holder}) has "
            f"ended or is out of reach. Look at that process and its log first ({first}){found}"
        )

    def forget(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def close(self) -> None:
        """Nobody asks any more: its thread ends."""
        self._aside.leave()

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            answer = self._aside.ask(question).get(timeout=ANSWER_S)
        except queue.Empty:
            self._aside.leave()
            raise PeerTimeoutError(
                f"the store of the process group has not answered for {ANSWER_S:g} s: the process "
                "that holds it (rank 0, or torchrun's agent) is stopped, gone, or out of reach. "
                "Look at that process and its log"
            ) from None
        if isinstance(answer, RuntimeError):
            raise self._lost(answer) from answer
        if isinstance(answer, BaseException):
            raise answer
        return answer


def default_board() -> Board | None:
    """The board of the default process group; None without one (or with the fake one)."""
    store = default_store()
    if store is None:
        return None
    boards = kept("boards")
    board: Board | None = boards.get("default")
    if board is None or board._store is not store:
        board = boards["default"] = Board(store)
        board.set(f"shardwise/card/{dist.get_rank()}", Process.own().card)
    return board


def text_of(position: Position | None) -> str:
    """Where a rank is, in words."""
    return "outside of a step" if position is None else position.text


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
        process = board.process_of(rank)
        state = "unknown" if process is None else process.state
        quiet = {
            "runs": "in user code, or in a wait of another kind (its own log says)",
            "unknown": "in user code, stopped, ended, or in a wait of another kind",
        }
        text = at or quiet.get(state, "")
        if process is not None and state in _TROUBLES:
            text = f"{_TROUBLES[state]} (process {process.pid}){', ' if text else ''}{text}"
        lines.append(f"  rank {rank}: {text}")
    if len(ranks) > _SHOWN:
        lines.append(f"  ... and {len(ranks) - _SHOWN} more ranks")
    return lines


def check_lives(board: Board, ranks: Iterable[int], what: str) -> None:
    """TransportError if one of these ranks has ended: nobody need wait for it."""
    for rank in ranks:
        process = board.process_of(rank)
        if process is not None and process.state == "ended":
            raise TransportError(
                f"rank {rank} (process {process.pid}) has ended while rank {dist.get_rank()} waits "
                f"for {what}. Read the log of rank {rank} first"
            )


def ended_ranks(ranks: Iterable[int]) -> str:
    """What to say about a broken connection: which of these ranks have ended, as far as is known
    here."""
    board, found, processes = default_board(), [], []
    with contextlib.suppress(TransportError):
        processes = [(r, board.process_of(r)) for r in ranks] if board is not None else []
    look_until = time.monotonic() + _ENDING_S
    while processes and not found:
        found = [f"rank {r} (process {p.pid})" for r, p in processes if p and p.state == "ended"]
        if found or time.monotonic() > look_until:
            break
        time.sleep(0.02)
    if found:
        return (
            f"{' and '.join(found)} {'have' if len(found) > 1 else 'has'} ended: read there first."
        )
    return (
        "A peer ended, issued something else, or took longer than the process group's timeout; "
        "read the logs of the other ranks first."
    )
