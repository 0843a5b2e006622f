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
import logging
import os
import pickle
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch_compat import default_store
from shardwise.comm.kept import kept
from shardwise.comm.limits import START_AGAIN, wait_limit_s, warn_after_s
from shardwise.comm.liveness import Process
from shardwise.comm.transport import Position
from shardwise.errors import PeerTimeoutError, TransportError

logger = logging.getLogger(__name__)

STALL_S = 2.0  # a wait this long is told to the others
ANSWER_S = 5.0  # a store that takes longer is stopped or gone
_NOTHING = "?"
_SHOWN = 64  # ranks in one text
_TROUBLES = {"ended": "has ended", "stopped": "is stopped, by a signal or a debugger"}


_Questions = queue.SimpleQueue[tuple[Callable[[], Any], Any] | None]


class Board:
    """The store, asked with a limit."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.in_phase: dict[Any, None] = {}  # the order checks of this rank in which a phase is on
        self.heard: tuple[int, str] | None = None  # the trouble of a rank, which ends a phase here
        self._processes: dict[int, Process] = {}
        self._questions: _Questions | None = None

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
        if isinstance(answer, RuntimeError):
            raise self._lost(answer) from answer
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


def check_lives(ranks: Iterable[int], what: str) -> None:
    """TransportError if one of these ranks has ended: nobody need wait for it."""
    board = default_board()
    for rank in ranks:
        process = board.process_of(rank) if board is not None else None
        if process is not None and process.state == "ended":
            raise TransportError(
                f"rank {rank} (process {process.pid}) has ended while rank {dist.get_rank()} waits "
                f"for {what}. Read the log of rank {rank} first"
            )


def ended_ranks(ranks: Iterable[int]) -> str:
    """What to say about a broken connection: which of these ranks have ended, as far as is known
    here."""
    board, found = default_board(), []
    with contextlib.suppress(TransportError):
        processes = [(r, board.process_of(r)) for r in ranks] if board is not None else []
        found = [f"rank {r} (process {p.pid})" for r, p in processes if p and p.state == "ended"]
    if found:
        return (
            f"{' and '.join(found)} {'have' if len(found) > 1 else 'has'} ended: read there first."
        )
    return (
        "A peer ended, issued something else, or took longer than the process group's timeout; "
        "read the logs of the other ranks first."
    )


def all_ranks() -> range:
    return range(dist.get_world_size())


def explain(what: str, position: Position | None, waited_s: float) -> str:
    """The text of a wait that took long."""
    board, own = default_board(), dist.get_rank()
    head = f"rank {own} ({text_of(position)}) has waited {waited_s:.0f} s for {what}"
    return head if board is None else "\n".join([head, *whereabouts(board, all_ranks())])


def wait_for(
    work: Any,
    what: str,
    position: Position | None = None,
    *,
    ranks: Iterable[int] = (),
    heeds_work: bool = False,
) -> None:
    """Wait for a collective on the host. A long wait is told to the others, then logged, and an
    error at the limit, or once one of `ranks` has ended. With `heeds_work` a rank that says that
    it is busy (`AtWork`) is waited for however long it takes.
    """
    board, began, has_told, warned = default_board(), time.monotonic(), False, False
    was_over = not heeds_work  # who has just ended its work gets one more slice to come
    said: dict[int, str] = {}
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
            check_lives(ranks, what)
            before, said = said, busy_ranks(board, ranks) if heeds_work else {}
            is_over = waited > wait_limit_s() and said.items() <= before.items()
            if is_over and was_over:
                raise PeerTimeoutError(
                    f"{explain(what, position, waited)}\nAll ranks must make the same calls. If "
                    f"one needs longer, raise the limit: shardwise.set_wait_limit().{START_AGAIN}"
                ) from error
            was_over = is_over or was_over
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


class Told:
    """Around a wait that cannot be cut into slices: told to the others and logged as others are.
    The thread ends with the wait: Python that ends while a thread is in the store aborts."""

    def __init__(self, what: str) -> None:
        self._what, self._over = what, threading.Event()

    def __enter__(self) -> None:
        target, args = self._tell, (default_board(),)
        self._thread = threading.Thread(target=target, args=args, daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(ANSWER_S)

    def _tell(self, board: Board | None) -> None:
        if self._over.wait(STALL_S):
            return
        began, pause = time.monotonic() - STALL_S, max(0.0, warn_after_s() - STALL_S)
        with contextlib.suppress(TransportError):
            if board is not None:
                post_whereabouts(board, f"waits for {self._what}")
            while not self._over.wait(pause):
                waited = time.monotonic() - began
                pause = waited
                if board is None:
                    logger.warning("waited %.0f s for %s", waited, self._what)
                else:
                    logger.warning("%s", explain(self._what, None, waited))
            if board is not None:
                clear_whereabouts(board)


class AtWork(Told):
    """Around what a rank does while others wait for it: from STALL_S on it tells them that it is at
    it, for as long as its process runs."""

    def _tell(self, board: Board | None) -> None:
        began = time.monotonic()
        while not self._over.wait(STALL_S) and board is not None:
            text = f"{_BUSY}{self._what}, for {time.monotonic() - began:.0f} s"
            with contextlib.suppress(TransportError):
                post_whereabouts(board, text)
        if time.monotonic() - began > STALL_S and board is not None:
            with contextlib.suppress(TransportError):
                clear_whereabouts(board)


_BUSY = "at work: "


def busy_ranks(board: Board, ranks: Iterable[int]) -> dict[int, str]:
    """What those say that are at work; whose process is stopped says the same for ever."""
    texts = {rank: board.find(f"shardwise/where/{rank}") or "" for rank in ranks}
    return {rank: text for rank, text in texts.items() if text.startswith(_BUSY)}


def gather_objects(own: Any, group: dist.ProcessGroup | None, what: str) -> list[Any]:
    """`dist.all_gather_object`, with a wait like others where it goes over Gloo."""
    world = dist.get_world_size(group)
    if "gloo" not in dist.get_backend(group):
        found: list[Any] = [None] * world
        dist.all_gather_object(found, own, group=group)
        return found
    data = _packed(own)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    _run(lambda: dist.all_gather(sizes, _size(data), group=group, async_op=True), group, what)
    parts = [torch.empty(int(max(sizes)), dtype=torch.uint8) for _ in range(world)]
    data = torch.nn.functional.pad(data, (0, int(max(sizes)) - data.numel()))
    _run(lambda: dist.all_gather(parts, data, group=group, async_op=True), group, what)
    return [_unpacked(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def broadcast_object(own: Any, group: dist.ProcessGroup | None, what: str) -> Any:
    """What the group's first rank has, with a wait like others where it goes over Gloo."""
    if "gloo" not in dist.get_backend(group):
        box = [own]
        dist.broadcast_object_list(box, group=group, group_src=0)
        return box[0]
    data = _packed(own)
    size = _size(data)
    _run(lambda: dist.broadcast(size, group=group, async_op=True, group_src=0), group, what)
    if dist.get_rank(group):
        data = torch.empty(int(size), dtype=torch.uint8)
    _run(lambda: dist.broadcast(data, group=group, async_op=True, group_src=0), group, what)
    return _unpacked(data)


def _packed(thing: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _size(data: torch.Tensor) -> torch.Tensor:
    return torch.tensor([data.numel()])


def _run(issue: Callable[[], Any], group: dist.ProcessGroup | None, what: str) -> None:
    """A collective in which ranks may be busy for long."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    try:
        if (work := issue()) is not None:
            wait_for(work, what, ranks=ranks, heeds_work=True)
    except TransportError:
        raise
    except RuntimeError as error:  # Gloo's, of a connection
        # Less the place in Gloo's sources.
        first = re.sub(r"^\[\S+\.cc:\d+\] ", "", next(iter(str(error).splitlines()), ""))
        text = f"rank {dist.get_rank()} waited for {what}: {first}\n{ended_ranks(ranks)}"
        raise TransportError(text) from error
