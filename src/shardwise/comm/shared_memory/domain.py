"""Ranks that share memory: phases, fences, waiting, and errors of a wait. A set of ranks has one
domain, whatever meshes it forms; phases of several domains of a rank (parameters on meshes of other
ranks) may run together.

    enter    control passes from the user to the engine: phase p begins on this rank
    (entry)  the first gather of p waits until all ranks have entered p, and compares positions
    leave    announce that this rank has left p, wait until all have; control is the user's again
    abandon  an exception ended p here: announce it, and wait a little for peers still in p

Ordering argument. A rank's user code writes its shards only outside of phases: before its `entered
= p` and after it saw `left >= p` of all ranks. A peer reads these shards only after it saw `entered
>= p` (so it sees all writes before: the flag was stored after them) and before its own `left = p`
(so none of its reads comes after the owner's next write: reads are complete before the flag is
stored). Hence each gather of phase p reads exactly the version that the owner held when it entered
p. The stores and loads are ordered as futex.py says.

Abandoned phases. Per phase either all ranks leave or all get an error. Mostly all ranks fail alike,
and each should see its own exception rather than that of the fastest. So a rank that abandons p
stores `abandoned[p & 1] = p`, then `left = p` (in every domain in which its phase ends so, before
it waits in any), and waits until the others have left p too, or for PARK_S: then it is *gone* and
may write its shards. A peer still in p goes on gathering while the rank is parked, and checks for
gone after each gather (a new shard value that it could have read was stored after the word, so the
check sees it). Waits that the rank can no longer satisfy, and `leave`, end with an error at the
first word. To keep two words enough, `enter` of p + 1 first waits until all have left p: nobody is
ever more than one phase ahead. Mailboxes are free again then.

Calls may come from different threads (autograd's), but never overlap in time; there are no locks.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary

from shardwise.comm.kept import kept
from shardwise.comm.limits import wait_limit_s
from shardwise.comm.shared_memory.access import Access, exchange, open_access
from shardwise.comm.shared_memory.control import (
    DOORBELL_WORD,
    FENCE_WORD,
    FLAGS_BYTES,
    Control,
    hash_of,
)
from shardwise.comm.shared_memory.futex import Doorbell, MemoryOrder
from shardwise.comm.transport import Axis, Bucket, Position, Transport, remark_on
from shardwise.comm.waits import Wait
from shardwise.errors import DivergenceError, TransportError

logger = logging.getLogger(__name__)

POLLS = 50  # with sched_yield, before sleeping: what a peer needs that is about to arrive
SLICE_S = 0.5  # of sleep, between checks that the peers live
PARK_S = 5.0  # that a rank with an exception waits for its peers
LONGEST_S = 1.0  # of a wait that may end without what it is for, see mailbox.py

_running: list[Domain] = []  # those of this process in which a phase is on


def running() -> list[Domain]:
    """The domains in which this rank is in a phase."""
    return _running


class Mail(Protocol):
    """Exchanges that may be pending in a phase (mailbox.py); the domain completes or drops them."""

    def progress(self) -> None: ...

    def finish_all(self) -> None: ...

    def drop_all(self) -> None: ...

    def free_slots(self) -> None: ...


class Domain:
    """One mesh's shared memory on this rank.

    `controls` and all indices are in the order of global ranks.
    """

    def __init__(self, access: Access) -> None:
        self.ranks = access.ranks
        self.me = access.me
        self.arena = access.arena
        self.controls = access.controls
        self.own: Control = access.controls[access.me]
        self.others = tuple(i for i in range(len(access.ranks)) if i != access.me)
        self.buckets: WeakValueDictionary[int, Bucket] = WeakValueDictionary()
        self.num_attached = 0
        self.phase = 0
        self.active = False
        self._limit_s: float | None = None  # of waits; None: the process's
        first, mine = access.controls[0].mapping, self.own.mapping
        self.doorbell = Doorbell(first.words, DOORBELL_WORD, first.address(8 * DOORBELL_WORD))
        fence = Doorbell(mine.words, FENCE_WORD, mine.address(8 * FENCE_WORD))
        self.order = MemoryOrder(fence)
        self.mail: Mail | None = None
        self._pid = os.getpid()
        self._all_entered = False
        self._gave_up = 0  # the phase that an exception ended here, until its peers were waited for
        self.position = Position(0, "", "")
        self.over_groups: list[Transport] = []  # that stand in for shared memory in this phase
        self.is_watched = False  # by tools on any rank; known after the entry fence
        self._round = 0

    # -- phases
    def enter(self, position: Position, *, is_watched: bool = False) -> None:
        if os.getpid() != self._pid:
            raise TransportError(
                "shared_memory: this process was forked from a rank; only the rank itself may use "
                "the engine. Start helpers with spawn, or keep the model out of them."
            )
        if self.active:
            raise TransportError(
                f"shared_memory: {position.phase} of {position.unit!r} entered while "
                f"{self.own.text} has not been left; a phase ends with leave() or abandon()."
            )
        previous = self.phase
        self.wait(
            lambda: all(self.controls[i].left >= previous for i in self.others),
            lambda i: self.controls[i].left < previous,
            "to leave the phase before (it was abandoned here)",
            heed_abandon=False,
        )
        if self.mail is not None:
            self.mail.drop_all()
            self.mail.free_slots()
        self.phase += 1
        self.active = True
        self.position, self.over_groups = position, []
        _running.append(self)
        self._all_entered, self.is_watched, self._round = False, False, 0
        own = self.own
        own.text = position.text
        own.position, own.at = hash_of(position), 0
        own.posted = 0
        own.watched = self.phase if is_watched else 0
        self.order()
        own.entered = self.phase
        self.doorbell.ring()

    def entry_fence(self) -> None:
        """Wait until all ranks are in this phase, and at the same position."""
        phase = self._phase("a gather or reduction")
        if self._all_entered:
            return
        self.wait(
            lambda: all(self.controls[i].entered >= phase for i in self.others),
            lambda i: self.controls[i].entered < phase,
            "to enter the same phase",
            heed_abandon=False,
        )
        # Positions first: they stand until this rank leaves, and are the better error.
        for i in self.others:
            if self.controls[i].position != self.own.position:
                # `pass N, PHASE, unit 'NAME'`
                theirs = self.controls[i].text.split(", ")[1]
                raise DivergenceError(
                    f"rank {self.ranks[self.me]} is at {self.own.text}, rank {self.ranks[i]} at "
                    f"{self.controls[i].text}: all ranks of a mesh must run the same forwards and "
                    "backwards in the same order. Look for a branch that depends on the rank or "
                    "on local data." + remark_on(self.position.phase, theirs)
                )
        self.check_gone()
        self.is_watched = any(c.watched == phase for c in self.controls)
        self._all_entered = True

    def leave(self) -> None:
        phase = self._phase("leave")
        if self.mail is not None:
            self.mail.finish_all()
        self.entry_fence()
        self.order()  # reads of peers' shards come before the flag
        self.own.left = phase
        self._end()
        self.doorbell.ring()
        self.wait(
            lambda: all(self.controls[i].left >= phase for i in self.others),
            lambda i: self.controls[i].left < phase,
            "to finish the phase",
            heed_abandon=False,
        )
        self.check_abandoned()

    def _end(self) -> None:
        self.active = False
        if self in _running:
            _running.remove(self)

    def give_up(self, why: str = "") -> None:
        """An exception ended the phase here: say so, and why (by itself: the exception that is on
        its way). `abandon` must follow, before shards are written.
        """
        if not self.active:
            return
        self._end()
        if self.mail is not None:
            self.mail.drop_all()
        self._gave_up, own = self.phase, self.own
        own.say_why(self.phase, why or self._reason())
        own.mark_abandoned(self.phase, gone=False)
        self.order()
        own.left = self.phase
        self.doorbell.ring()

    def _reason(self) -> str:
        error = sys.exc_info()[1]
        first = next(iter(str(error).splitlines()), "")
        if isinstance(error, TransportError):
            return first  # says itself which rank it is about
        return f"rank {self.ranks[self.me]}: {type(error).__name__}: {first}" if error else ""

    def abandon(self) -> None:
        """Give up, and wait a little for peers that are still in the phase."""
        self.give_up()
        phase, self._gave_up = self._gave_up, 0
        if not phase:
            return
        self._park(phase)
        self.own.mark_abandoned(phase, gone=True)
        self.order()
        self.doorbell.ring()

    def _park(self, phase: int) -> None:
        """Leave shards alone while peers may read them; not for long, the caller has an error."""
        self._limit_s = min(wait_limit_s(), PARK_S)
        try:
            self.wait(
                lambda: all(self.controls[i].left >= phase for i in self.others),
                lambda i: self.controls[i].left < phase,
                "to finish the phase that an exception ended here",
                heed_abandon=False,
            )
        except TransportError as error:
            logger.debug("not all ranks left the phase: %s", error)
        finally:
            self._limit_s = None

    def _is_abandoned(self) -> bool:
        self.order()
        return any(self.controls[i].has_abandoned(self.phase) for i in self.others)

    def check_gone(self) -> None:
        """Raise when a peer has abandoned this phase and may be writing its shards."""
        self.order()
        if any(self.controls[i].has_gone(self.phase) for i in self.others):
            self.check_abandoned()

    def check_abandoned(self) -> None:
        """Raise when a peer has ended this phase by an exception; it then ends here as well."""
        self.order()
        for i in self.others:
            if self.controls[i].has_abandoned(self.phase):
                where, rank = self.own.text, self.ranks[i]
                # What it has heard itself is passed on: the cause may be on another rank.
                why = self.controls[i].why_abandoned(self.phase) or f"rank {rank}: an exception"
                self.give_up(why)
                cause = f"The cause is the error on rank {rank}; read its log first ({why})."
                if not why.startswith(f"rank {rank}:"):
                    cause = f"The cause is elsewhere: {why}"
                raise TransportError(
                    f"rank {rank} ended {where} by an exception, so this phase ends here too. "
                    f"{cause}"
                )

    def _phase(self, what: str) -> int:
        if not self.active:
            raise TransportError(f"shared_memory: {what} outside of a phase; call enter() first.")
        return self.phase

    # -- small exchanges
    def agree(self, flags: list[bool]) -> list[bool]:
        """ "Or" over all ranks, in rounds of one buffer's length."""
        if not self.others or not flags:
            return list(flags)
        self.entry_fence()
        agreed: list[bool] = []
        for start in range(0, len(flags), FLAGS_BYTES):
            agreed += self._agree_round(bytes(flags[start : start + FLAGS_BYTES]), len(flags))
        return agreed

    def _agree_round(self, flags: bytes, num_flags: int) -> list[bool]:
        # Two buffers are enough: nobody writes round n + 2 before all have announced n + 1, and a
        # rank announces n + 1 after it has read round n. Rounds start anew in each phase, after its
        # fences.
        round_ = self._round
        self._round += 1
        announced = self._phase("agree") << 16 | round_ + 1
        self.own.write_flags(round_, flags, num_flags)
        self.order()
        self.own.agreed = announced
        self.doorbell.ring()
        self.wait(
            lambda: all(self.controls[i].agreed >= announced for i in self.others),
            lambda i: self.controls[i].agreed < announced,
            "to agree on what follows",
        )
        # A peer that has announced may be at an exception already, to which this rank comes too.
        bits = int.from_bytes(flags, "little")
        for i in self.others:
            theirs = self.controls[i].num_flags(round_)
            if theirs != num_flags:
                raise DivergenceError(
                    f"{self.own.text}: rank {self.ranks[self.me]} brought {num_flags} flags, rank "
                    f"{self.ranks[i]} {theirs}: the ranks have different models or units."
                )
            bits |= int.from_bytes(self.controls[i].read_flags(round_, len(flags)), "little")
        return [bool(flag) for flag in bits.to_bytes(len(flags), "little")]

    # -- waiting
    def wait(
        self,
        ready: Callable[[], bool],
        lacks: Callable[[int], bool],
        what: str,
        *,
        heed_abandon: bool = True,
        stuck: Callable[[], bool] | None = None,
    ) -> None:
        """Until `ready()`; `lacks(i)` says whether rank index i is waited for, `what` for what.

        `stuck` is asked when all ranks sleep and nothing was announced since; True ends the wait.
        """
        for _ in range(POLLS):
            if ready():
                self.order()
                return
            os.sched_yield()
        self._sleep(ready, lacks, what, heed_abandon, stuck)

    def _sleep(
        self,
        ready: Callable[[], bool],
        lacks: Callable[[int], bool],
        what: str,
        heed_abandon: bool,
        stuck: Callable[[], bool] | None,
    ) -> None:
        started = time.monotonic()
        check_at, wait = started + SLICE_S, _Lack(self, lacks, what)
        # What other domains announce rings other bells.
        slice_s = SLICE_S if stuck is None and _running in ([], [self]) else SLICE_S / 100
        while True:
            seen = self.doorbell.value
            self.order()  # the doorbell is read before the flags
            if ready():
                self.order()
                return
            if heed_abandon and self._is_abandoned() and not ready():
                self.check_abandoned()  # what a peer did before its exception counts
            self._tell_sleep(seen)
            try:
                self.doorbell.sleep(seen, slice_s)
                is_over = self._all_sleep(seen) or time.monotonic() - started > LONGEST_S
                if stuck is not None and is_over and stuck():
                    return
            finally:
                self._tell_sleep(-1)
            now = time.monotonic()
            if now < check_at:
                continue
            check_at = now + SLICE_S
            self._check_alive(lacks, what)
            wait.look(now - started)

    def _tell_sleep(self, seen: int) -> None:
        """In all domains: whoever sleeps in one brings nothing on in the others; -1: awake."""
        self.own.waiting = seen + 1
        for other in _running:
            if other is not self:
                other.own.waiting = other.doorbell.value + 1 if seen >= 0 else 0

    def _all_sleep(self, seen: int) -> bool:
        return self.doorbell.value == seen and all(c.waiting == seen + 1 for c in self.controls)

    def _check_alive(self, lacks: Callable[[int], bool], what: str) -> None:
        for i in self.others:
            if not self.controls[i].mapping.owner_lives():
                # It may have announced what is waited for before it ended.
                if not any(lacks(j) for j in self.others):
                    return
                raise TransportError(
                    f"rank {self.ranks[i]} (process {self.controls[i].pid}) has ended.\n"
                    + self._describe(lacks, what)
                    + f"\nRead the log of rank {self.ranks[i]}, then start the job again."
                )

    def _describe(
        self, lacks: Callable[[int], bool], what: str, elapsed_s: float | None = None
    ) -> str:
        missing = [i for i in self.others if lacks(i)]
        plural = "s" if len(missing) > 1 else ""
        whom = ", ".join(str(self.ranks[i]) for i in missing) or "?"
        lines = [f"rank {self.ranks[self.me]} waits for rank{plural} {whom} {what}"]
        if elapsed_s is not None:
            lines[0] += f", for {elapsed_s:.0f} s"
        lines += [
            f"  rank {self.ranks[i]}: {self._whereabouts(c)}" for i, c in enumerate(self.controls)
        ]
        return "\n".join(lines)

    def _whereabouts(self, control: Control) -> str:
        if not control.entered:
            return "has not entered the engine"
        place = control.text
        if control.at:
            place += f", last at {control.record(control.at - 1).name}"
        if control.has_abandoned(control.entered):
            place += ", abandoned after an exception"
        elif control is self.own:
            return place + ", waits here"
        elif control.left >= control.entered and not control.waiting:
            place += ", left: in user code, or in a wait of another kind (its own log says)"
        return place + (", waits for other ranks" if control.waiting else "")


class _Lack(Wait):
    """A wait of which peers can see themselves: control blocks say it all."""

    remedy = "All ranks of a mesh must make the same engine calls"

    def __init__(self, domain: Domain, lacks: Callable[[int], bool], what: str) -> None:
        super().__init__(what, domain.position, limit_s=domain._limit_s)
        self._look_at = SLICE_S
        self._domain, self._lacks = domain, lacks

    def tell(self) -> None:
        """Nobody reads the board."""

    def describe(self, waited_s: float) -> str:
        return self._domain._describe(self._lacks, self._what, waited_s)


def domain_of(shard: Axis, replicate: Axis) -> Domain | str:
    """The domain of the ranks of a mesh, or why there is none. Collective on the first call for a
    mesh, then a look-up.

    One domain for one set of ranks, whatever roles they have in a mesh: a phase is the ranks', and
    what moves in it under several strategies or axes is fenced, read and completed as one.
    """
    if shard.size == replicate.size == 1:
        return "one rank has nobody to share with"
    known = kept("domains")
    axes = (shard.ranks, replicate.ranks)
    if axes not in known:
        ranks = tuple(sorted(exchange(shard, replicate, shard.ranks[shard.rank])))
        if ranks not in known:
            access = open_access(shard, replicate)
            known[ranks] = access if isinstance(access, str) else Domain(access)
        known[axes] = known[ranks]
    return known[axes]
