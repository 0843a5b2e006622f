"""Do all ranks issue the same collectives? Asked before they are issued, on c10d.

A process group pairs collectives by their order alone. Ranks that gather different units of one
size get each other's numbers without a word; of different sizes, Gloo ends the process; ranks that
issue different counts wait for ever. Asking before every collective would cost more than the
collective. So each rank remembers what it issued in the last phase of the same kind, and which
phase followed which:

    as remembered    nothing is asked. All ranks remember the same, so ranks that all do what they
                     remember do the same
    otherwise        (first step, another branch) the rank holds the collective back, posts what it
                     has issued, and looks at its neighbour in the ring of ranks: one that does
                     the same posts the same; one that does as it remembers will wait soon for this
                     rank, says so on the board, or ends its phase. Then they differ: a named error
                     on both, before anything was paired wrongly

At the end of each phase ranks compare a hash of what they issued with their neighbour's: ranks that
agree in a ring all agree. All of it goes through the store beside the data path: nothing is added
to the collectives that tools count, and a rank that hangs can still be told about.

    store key   <mesh>/<rank>/end <n % 16>  how a rank ended phase n: hash, count, last unit
    store key   <mesh>/<rank>/<n % 16>      what it has issued in phase n, when it had to say so
    store key   <mesh>/trouble              the phase that ended by an error, and the error

Costs one write and one read of the store a phase.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from typing import Any

from shardwise.comm.board import Board, default_board, text_of
from shardwise.comm.transport import Axis, Position, how_to_differ, remark_on
from shardwise.comm.waits import Wait, in_slices
from shardwise.errors import DivergenceError, PeerTimeoutError

KEPT_PHASES = 16
_KNOWN = 64  # ranks whose processes are looked up before anything went wrong
FIRST_PAUSE_S = 5e-5  # about what a look takes
ABANDONED = -1  # in place of a hash
_REMEDY = (
    "All ranks must run the same units in the same order on c10d; look for a branch or a loop that "
    "depends on the rank or on local data and make every rank run every unit, or use "
    "transport='shared_memory' on one host"
)
_OTHER_MEMBERS = " The ranks train different parameters of a unit: set requires_grad alike on all"

# Transports of one shape that this process has made: ranks make them in the same order, so the
# number tells those of equal ranks apart.
_MADE: dict[str, int] = {}


class OrderCheck:
    """The check of one mesh axis on one rank. See the module docstring."""

    def __init__(self, board: Board, ranks: tuple[int, ...], rank: int, mesh: str) -> None:
        self._board = board
        self._ranks, self._rank = ranks, rank
        self._neighbour = ranks[(ranks.index(rank) + 1) % len(ranks)]
        self._mesh = f"shardwise/{mesh}"
        self._phase = 0  # that runs now
        self._position: Position | None = None
        self._issued: list[str] = []  # in this phase
        self._names: list[str] = []  # the same in words
        self._remembered: list[str] = []
        self._as_remembered = True
        self._orders: dict[tuple[str, str], list[str]] = {}
        self._followers: dict[Any, tuple[str, str]] = {}
        self._kind: tuple[str, str] | None = None
        self._last = "nothing yet"

    @classmethod
    def of(cls, axis: Axis) -> OrderCheck | None:
        """None where there is nobody to compare with, or no store."""
        if axis.size == 1:
            return None
        board = default_board()
        if board is None:
            return None
        ranks = f"{axis.name} {axis.ranks}"
        _MADE[ranks] = number = _MADE.get(ranks, 0) + 1
        return cls(board, axis.ranks, axis.ranks[axis.rank], f"{ranks} {number}")

    # -- phases and collectives ------------------------------------------------------------------
    def begin_phase(self, position: Position) -> None:
        """Control enters the engine."""
        before, self._kind = self._kind, (position.phase, position.unit)
        self._phase += 1
        self._board.in_phase[self] = None
        if self._phase == 2:  # all ranks have shown their cards; the store may be lost later
            for rank in self._ranks[:_KNOWN]:
                self._board.process_of(rank)
        self._position, self._board.heard = position, None
        self._issued, self._names = [], []
        self._as_remembered = self._followers.get(before) == self._kind
        self._remembered = self._orders.get(self._kind, [])
        self._followers[before] = self._kind
        if not self._as_remembered:
            self._meet(f"{position.phase} of unit {position.unit!r}")

    def note(self, kind: str, name: str, number: int, members: str = "") -> None:
        """A collective is about to be issued, about some parameters of a bucket. Raises
        DivergenceError when the neighbour is known to issue another one.
        """
        item, at = f"{kind} {number} {members}", len(self._issued)
        self._issued.append(item)
        self._names.append(f"{name} (only {members})" if members else name)
        if self._as_remembered and at < len(self._remembered) and self._remembered[at] == item:
            return
        self._as_remembered = False
        if self._position is not None:
            self._meet(f"{kind} of {name}")

    def end_phase(self, position: Position) -> None:
        """Compare with the next rank in the ring."""
        if self._names:
            self._last = f"{self._issued[-1].partition(' ')[0]} of {self._names[-1]}"
        assert self._kind is not None
        self._orders[self._kind] = self._issued
        done = " ".join([*self._kind, *self._issued])
        mine = [zlib.crc32(done.encode()), len(self._issued)]
        self._tell_end(mine, text_of(position))
        self._position = None
        self._board.in_phase.pop(self, None)
        theirs = self._entry_of(self._neighbour)
        if theirs is None:
            waiting = f"the end of {text_of(position)}"
            self._poll(lambda: self._entry_of(self._neighbour), waiting, position)
            theirs = self._entry_of(self._neighbour)
        if theirs is None or theirs[1:3] == mine:
            return
        self._orders.clear()  # whatever comes next is asked for
        if theirs[1] == ABANDONED:
            self.check_trouble()  # the rank where it began may be another one
            raise DivergenceError(
                f"rank {self._neighbour} ended {position.phase} by an exception, rank {self._rank} "
                "did not; the cause is the error there, read its log first"
            )
        raise self._diverged(
            f"{mine[1]} here, the last one the {self._last}; {theirs[2]} there, the last one the "
            f"{theirs[3]}. What was gathered in between belongs to other units"
        )

    def abandon(self, reason: str = "an exception") -> None:
        """An exception ended the phase here: say so, and ask about whatever comes next."""
        if self._position is None:
            return
        rank, reason = self._board.heard or (self._rank, reason)
        trouble = [self._phase, rank, reason]
        self._tell_end([ABANDONED, len(self._issued)], "a phase by an exception")
        self._board.set(f"{self._mesh}/trouble", json.dumps(trouble))
        self._position = self._kind = None
        self._board.in_phase.pop(self, None)
        self._orders.clear()
        self._followers.clear()

    def _tell_end(self, mine: list[int], text: str) -> None:
        entry = [self._phase, *mine, self._last, text, self._as_remembered]
        self._board.set(self._end_key(self._rank), json.dumps(entry))

    def _end_key(self, rank: int) -> str:
        return f"{self._mesh}/{rank}/end {self._phase % KEPT_PHASES}"

    # -- asking ----------------------------------------------------------------------------------
    def _meet(self, what: str) -> None:
        """Hold back what is not as remembered until the neighbour is known to do the same."""
        self._say()
        self._poll(lambda: self._does_the_same(what), what, self._position)

    def _say(self) -> None:
        """Show what was issued in this phase."""
        key = f"{self._mesh}/{self._rank}/{self._phase % KEPT_PHASES}"
        said = [self._phase, self._kind, self._issued, self._names]
        self._board.set(key, json.dumps(said))

    def _said(self, rank: int) -> list[Any] | None:
        """What that rank has said about this phase."""
        return self._of_this_phase(f"{self._mesh}/{rank}/{self._phase % KEPT_PHASES}")

    def _does_the_same(self, what: str) -> bool | None:
        """True: the neighbour has said the same; None: it has said nothing yet."""
        said = self._said(self._neighbour)
        if said is not None:
            self._compare(said, self._neighbour)
            if len(said[2]) >= len(self._issued):
                return True
        ended = self._entry_of(self._neighbour)
        if ended is None or ended[1] == ABANDONED:
            return None
        if not ended[5]:
            # It has asked too, so it has said what; this rank may have looked just before.
            return True if said is not None else None
        raise self._diverged(
            f"the {what} here, which is not what came last time; there {ended[4]} ended as last "
            f"time, after {ended[2]} collectives, the last one the {ended[3]}",
            so_far="are to issue",
        )

    def _compare(self, said: list[Any], rank: int) -> None:
        """Raise when that rank issued something else in this phase."""
        if tuple(said[1]) != self._kind:
            raise self._diverged(
                f"rank {self._rank} is in {' of unit '.join(map(str, self._kind or ()))!r}, rank "
                f"{rank} in {' of unit '.join(said[1])!r}",
                so_far="are to issue",
                remark=remark_on(self._kind[0] if self._kind else "", said[1][0]),
                rank=rank,
            )
        for i, (mine, theirs) in enumerate(zip(self._issued, said[2], strict=False)):
            if mine != theirs:
                here = f"{mine.partition(' ')[0]} of {self._names[i]}"
                there = f"{theirs.partition(' ')[0]} of {said[3][i]}"
                same_bucket = mine.split(" ")[:2] == theirs.split(" ")[:2]
                raise self._diverged(
                    f"as number {i + 1} rank {self._rank} issues the {here}, rank {rank} the "
                    f"{there}",
                    remark=_OTHER_MEMBERS if same_bucket else "",
                    so_far="are to issue",
                    rank=rank,
                )

    def _diverged(
        self, how: str, so_far: str = "issued", remark: str = "", rank: int | None = None
    ) -> DivergenceError:
        phase = self._kind[0] if self._kind else "a phase"
        other = self._neighbour if rank is None else rank
        return DivergenceError(
            f"rank {self._rank} and rank {other} {so_far} different collectives in "
            f"{phase}: {how}. {_REMEDY}{'.' if remark else ''}{remark}"
        )

    def _entry_of(self, rank: int) -> list[Any] | None:
        """That rank's record of this phase once it has ended it; None before."""
        return self._of_this_phase(self._end_key(rank))

    def _of_this_phase(self, key: str) -> list[Any] | None:
        found = json.loads(self._board.find(key) or "[null]")
        return found if found[0] == self._phase else None

    # -- waits that take long ----------------------------------------------------------------------
    def _poll(self, look: Callable[[], Any], what: str, position: Position | None) -> None:
        """Until `look` finds something."""
        began, pause, watch = time.monotonic(), FIRST_PAUSE_S, _Watch(self, what, position)
        while not look():
            watch.look(time.monotonic() - began)
            time.sleep(pause)
            pause = min(0.02, 2 * pause)  # each look costs a message to the store
        watch.over()

    def wait(self, work: Any, what: str) -> None:
        """Wait for a collective; when it takes long, say so to the others and look where they are.

        Raises DivergenceError once another rank is known to do something else, PeerTimeoutError
        when it is elsewhere, or at the limit.
        """
        in_slices(work, lambda: _Watch(self, what, self._position, is_issued=True))

    def _check_elsewhere(self, what: str, text: str) -> None:
        """Raise when another rank stalls at something else, or has ended this phase."""
        for rank in self._ranks:
            if rank == self._rank:
                continue
            said = self._said(rank)
            if said is not None:
                self._compare(said, rank)
            ended = self._entry_of(rank)
            if ended is not None:
                raise PeerTimeoutError(
                    f"{text}\nrank {rank} has ended {ended[4]}, after {ended[2]} collectives, the "
                    f"last one the {ended[3]}; {len(self._issued)} here. {_REMEDY}."
                    + how_to_differ(self._position)
                )

    def check_trouble(self) -> None:
        """Raise what another rank has met in this phase."""
        text = self._board.find(f"{self._mesh}/trouble")
        if not text:
            return
        phase, rank, reason = json.loads(text)
        if phase >= self._phase and rank != self._rank:
            self._board.heard = (rank, reason)
            raise DivergenceError(
                f"rank {rank} ended the phase that rank {self._rank} waits in "
                f"({text_of(self._position)}), by: {reason}"
            )


class _Watch(Wait):
    """A wait of which the others, who may wait in any of this rank's checks, learn everything."""

    remedy = _REMEDY

    def __init__(
        self, check: OrderCheck, what: str, position: Position | None, *, is_issued: bool = False
    ) -> None:
        super().__init__(what, position, check._ranks)
        self._check, self._is_issued = check, is_issued
        self._has_said = False

    def check(self, waited_s: float) -> None:
        for each in list(self._check._board.in_phase):
            if not self._has_said:
                each._say()
            each.check_trouble()
        self._has_said = True
        super().check(waited_s)
        if self._is_issued:
            self._check._check_elsewhere(self._what, self.describe(waited_s))
