"""A wire: one transport with the engine's phases on it.

Control passes from the user to the engine and back many times a step; transports that read peers'
memory must know when (DESIGN section 7). Phases nest (a unit inside the root's forward, a
recomputed forward inside a backward), so a wire counts the depth and tells the transport about the
outermost phase only. All units of a mesh share one wire.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from shardwise.comm.transport import Position, Transport

_WIRES: weakref.WeakKeyDictionary[Transport, Wire] = weakref.WeakKeyDictionary()


class Wire:
    """Phases of one transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = weakref.ref(transport)
        self.depth = 0
        self.step = 0
        self.epoch = 0
        self._phase = ""

    @classmethod
    def of(cls, transport: Transport) -> Wire:
        """The wire of a transport; units of all models on one mesh meet here."""
        wire = _WIRES.get(transport)
        if wire is None:
            wire = _WIRES[transport] = cls(transport)
        return wire

    @property
    def transport(self) -> Transport:
        transport = self._transport()
        assert transport is not None, "units keep their transport alive"
        return transport

    def enter(self, phase: str, unit: str) -> int:
        """Returns the number of the outermost phase, which `leave` and `abandon` must name."""
        if self.depth == 0:
            self.epoch += 1
            self._phase = phase
            self.transport.enter(Position(self.step, phase, unit))
        self.depth += 1
        return self.epoch

    def leave(self, phase: str, unit: str, epoch: int) -> None:
        if epoch != self.epoch or not self.depth:
            return  # somebody else's exception has ended that phase
        self.depth -= 1
        if self.depth == 0:
            if phase == "backward":
                self.step += 1
            self.transport.leave(Position(self.step, phase, unit))

    def abandon(self, epoch: int) -> None:
        """An exception ended the phase, whatever its depth was."""
        if epoch == self.epoch and self.depth:
            self.depth = 0
            self.transport.abandon()

    def end_stale_backward(self) -> None:
        """Outside of any backward, none can be open: an exception has ended it."""
        if self.depth and self._phase == "backward":
            self.abandon(self.epoch)


Entered = dict[Wire, int]  # wires with the phases that were entered on them


def enter_all(wires: Iterable[Wire], phase: str, unit: str) -> Entered:
    """Control enters the engine on several transports."""
    return {wire: wire.enter(phase, unit) for wire in wires}


def leave_all(entered: Entered, phase: str, unit: str) -> None:
    """Control goes back to the user."""
    for wire, epoch in entered.items():
        wire.leave(phase, unit, epoch)
