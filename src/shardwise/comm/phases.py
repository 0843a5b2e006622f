"""A wire: what transports share that serve one set of ranks, with the engine's phases on it.

Control passes from the user to the engine and back many times a step; transports that read peers'
memory must know when. Phases nest (a unit inside the root's forward, a recomputed forward inside a
backward), so a wire counts the depth and tells the transport about the outermost phase only. All
units of a mesh share one wire; a model whose parameters lie on meshes of other ranks has several,
which are entered, left and abandoned together.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from shardwise.comm.transport import Position, Transport, abandon_all

_WIRES: weakref.WeakKeyDictionary[object, Wire] = weakref.WeakKeyDictionary()


class Wire:
    """Phases of the transports of one set of ranks."""

    def __init__(self, transport: Transport) -> None:
        self._transport = weakref.ref(transport)
        self.depth = 0
        self.step = 0
        self.epoch = 0
        self._phase = ""

    @classmethod
    def of(cls, transport: Transport) -> Wire:
        """The wire of a transport; units of all models on one mesh meet here."""
        wire = _WIRES.get(transport.phases)
        if wire is None:
            wire = _WIRES[transport.phases] = cls(transport)
        elif wire._transport() is None:
            wire._transport = weakref.ref(transport)
        return wire

    @property
    def transport(self) -> Transport:
        """One of them."""
        transport = self._transport()
        assert transport is not None, "units keep their transport alive"
        return transport

    def enter(self, phase: str, unit: str) -> int:
        """Returns the number of the outermost phase, which `leave` and `is_in` must name."""
        if self.depth == 0:
            try:
                self.transport.enter(Position(self.step, phase, unit))
            except BaseException:
                self.transport.abandon()  # it may have told peers that it comes
                raise
            self.epoch += 1
            self._phase = phase
        self.depth += 1
        return self.epoch

    def leave(self, phase: str, unit: str, epoch: int) -> None:
        if not self.is_in(epoch):
            return  # somebody else's exception has ended that phase
        if self.depth == 1:
            self.transport.leave(Position(self.step, phase, unit))
            self.step += phase == "backward"  # not before: this may raise, on all ranks
        self.depth -= 1

    def is_in(self, epoch: int) -> bool:
        return epoch == self.epoch and self.depth > 0

    def end_stale_backward(self) -> None:
        """Outside of any backward, none can be open: an exception has ended it."""
        if self.depth and self._phase == "backward":
            abandon_phases({self: self.epoch})


Entered = dict[Wire, int]  # wires with the phases that were entered on them


def enter_all(wires: Iterable[Wire], phase: str, unit: str) -> Entered:
    """Control enters the engine: on all wires, or on none."""
    entered: Entered = {}
    try:
        for wire in wires:
            entered[wire] = wire.enter(phase, unit)
    except BaseException:
        abandon_phases(entered)
        raise
    return entered


def leave_all(entered: Entered, phase: str, unit: str) -> None:
    """Control goes back to the user. Where a peer has ended the phase of one wire by an exception,
    those of the others end so too, before they are left: peers learn of it there.
    """
    try:
        for wire, epoch in entered.items():
            wire.leave(phase, unit, epoch)
    except BaseException:
        abandon_phases(entered)
        raise


def abandon_phases(*entered: Entered) -> None:
    """An exception ended these phases, whatever their depth was."""
    ended = {wire: None for phase in entered for wire, epoch in phase.items() if wire.is_in(epoch)}
    for wire in ended:
        wire.depth = 0
    abandon_all(wire.transport for wire in ended)


@contextmanager
def phase_on(wires: Iterable[Wire], phase: str, unit: str) -> Iterator[None]:
    """One phase on all wires; an exception ends it on all."""
    entered = enter_all(wires, phase, unit)
    try:
        yield
    except BaseException:
        abandon_phases(entered)
        raise
    leave_all(entered, phase, unit)
