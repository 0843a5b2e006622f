"""Do all ranks issue the same collectives? Checked at the end of every phase, on c10d.

A process group pairs collectives by their order alone. Ranks that gather different units of one
size get each other's numbers without a word; ranks that issue different counts wait for ever. So
every rank keeps a rolling hash of what it issued, and at the end of a phase compares it with its
neighbour's through the process group's store: ranks that agree in a ring all agree. The store is
beside the data path: nothing is added to the collectives that tools count, and a rank that hangs
can still be told about.

    store key   <mesh>/<rank>        the last phases of a rank: number, hash, count, last unit
    store key   <mesh>/<rank>/stall  where a rank has been waiting for longer than STALL_S

Costs one write and one read of the store a phase. `SHARDWISE_CHECK_ORDER=0` switches it off.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import deque
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise._torch_compat import default_store
from shardwise.comm.transport import Axis, Position
from shardwise.errors import DivergenceError, PeerTimeoutError

STALL_S = 5.0
KEPT_PHASES = 16


# Transports of one shape that this process has made: ranks make them in the same order, so the
# number tells those of equal ranks apart.
_MADE: dict[str, int] = {}


def _text(position: Position) -> str:
    return f"{position.phase} of step {position.step}"


class OrderCheck:
    """The check of one mesh axis on one rank."""

    def __init__(self, store: dist.Store, ranks: tuple[int, ...], rank: int, mesh: str) -> None:
        self._store = store
        self._ranks = ranks
        self._rank = rank
        self._mesh = f"shardwise/{mesh}"
        self._phase = 0
        self._hash = 0
        self._count = 0
        self._last = ""
        self._history: deque[list[Any]] = deque(maxlen=KEPT_PHASES)
        self.wait_limit_s = float(os.environ.get("SHARDWISE_WAIT_LIMIT_S", "120"))

    @classmethod
    def of(cls, axis: Axis) -> OrderCheck | None:
        """None where there is nobody to compare with, no store, or it is switched off."""
        if axis.size == 1 or os.environ.get("SHARDWISE_CHECK_ORDER") == "0":
            return None
        store = default_store()
        if store is None:
            return None
        ranks = f"{axis.name} {axis.ranks}"
        _MADE[ranks] = number = _MADE.get(ranks, 0) + 1
        return cls(store, axis.ranks, axis.ranks[axis.rank], f"{ranks} {number}")

    def note(self, kind: str, name: str, number: int) -> None:
        """A collective is issued."""
        self._last = f"{kind} of {name}"
        self._hash = zlib.crc32(f"{kind} {number}".encode(), self._hash)
        self._count += 1

    def abandon(self) -> None:
        """An exception ended the phase here: say so, and start counting anew."""
        self._phase += 1
        self._history.append([self._phase, -1, self._count, self._last, "a phase by an exception"])
        self._store.set(self._key(self._rank), json.dumps(list(self._history)))
        self._hash = self._count = 0

    def end_phase(self, position: Position) -> None:
        """Compare with the next rank in the ring."""
        self._phase += 1
        self._history.append([self._phase, self._hash, self._count, self._last, _text(position)])
        self._store.set(self._key(self._rank), json.dumps(list(self._history)))
        neighbour = self._ranks[(self._ranks.index(self._rank) + 1) % len(self._ranks)]
        theirs = self._read(neighbour)
        if theirs is None or (theirs[1], theirs[2]) == (self._hash, self._count):
            return
        here, self._hash, self._count = self._count, 0, 0  # the next phase is compared anew
        if theirs[1] == -1:
            raise DivergenceError(
                f"rank {neighbour} ended {position.phase} by an exception, rank {self._rank} did "
                "not; the cause is the error there, read its log first"
            )
        raise DivergenceError(
            f"rank {self._rank} and rank {neighbour} issued different collectives up to the end of "
            f"{position.phase}: {here} here, the last one the {self._last}; {theirs[2]} "
            f"there, the last one the {theirs[3]}. What was gathered in between belongs to other "
            "units. All ranks must run the same units in the same order on c10d; use "
            "transport='shared_memory' on one host, or make every rank run every unit"
        )

    def _key(self, rank: int) -> str:
        return f"{self._mesh}/{rank}"

    def _read(self, rank: int) -> list[Any] | None:
        """That rank's record of this phase; None when it is too old to be kept."""
        began, pause = time.monotonic(), 0.0
        while True:
            if self._store.check([self._key(rank)]):
                history = json.loads(self._store.get(self._key(rank)))
                for entry in history:
                    if entry[0] == self._phase:
                        return entry
                if history[0][0] > self._phase:
                    return None
            waited = time.monotonic() - began
            if waited > STALL_S and self._is_stalled(rank):
                raise PeerTimeoutError(self._stall_text(f"the end of phase {self._phase}", waited))
            if waited > self.wait_limit_s:
                raise PeerTimeoutError(self._stall_text(f"the end of phase {self._phase}", waited))
            time.sleep(pause)
            pause = min(0.01, pause + 0.0002)

    # -- waits that take long ----------------------------------------------------------------------
    def wait(self, work: Any, what: str) -> None:
        """Wait for a collective; when it takes long, say so to the others and look where they are.

        Raises PeerTimeoutError once another rank is known to wait for something else, or at the
        limit.
        """
        began, has_told = time.monotonic(), False
        while True:
            try:
                work.wait(timedelta(seconds=STALL_S))
                if has_told:
                    self._store.delete_key(self._key(self._rank) + "/stall")
                return
            except RuntimeError as error:
                waited = time.monotonic() - began
                if waited < STALL_S * 0.9 or work.is_completed():
                    raise
                self._store.set(self._key(self._rank) + "/stall", what)
                has_told = True
                if self._elsewhere(what) or waited > self.wait_limit_s:
                    raise PeerTimeoutError(self._stall_text(what, waited)) from error

    def _is_stalled(self, rank: int) -> bool:
        return self._store.check([self._key(rank) + "/stall"])

    def _elsewhere(self, what: str) -> bool:
        """Another rank stalls at something else, or has finished more phases than this one."""
        for rank in self._ranks:
            if rank == self._rank:
                continue
            if self._is_stalled(rank):
                if self._store.get(self._key(rank) + "/stall").decode() != what:
                    return True
            elif self._phase_of(rank) > self._phase:
                return True
        return False

    def _phase_of(self, rank: int) -> int:
        if not self._store.check([self._key(rank)]):
            return 0
        return json.loads(self._store.get(self._key(rank)))[-1][0]

    def _stall_text(self, what: str, waited_s: float) -> str:
        lines = [f"rank {self._rank} has waited {waited_s:.0f} s for {what} (last: {self._last})"]
        for rank in self._ranks:
            if rank == self._rank:
                continue
            if self._is_stalled(rank):
                at = self._store.get(self._key(rank) + "/stall").decode()
                lines.append(f"  rank {rank} waits for {at}")
            elif self._store.check([self._key(rank)]):
                entry = json.loads(self._store.get(self._key(rank)))[-1]
                lines.append(f"  rank {rank} ended {entry[4]}, its last collective the {entry[3]}")
            else:
                lines.append(f"  rank {rank} has not finished a phase")
        lines.append(
            "All ranks must run the same units in the same order; look for a branch or a loop that "
            "depends on the rank or on local data, and make every rank run it"
        )
        return "\n".join(lines)
