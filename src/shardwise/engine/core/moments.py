"""Moments: who is told of what happens in a context.

A listener is any object with methods that are named like moments; it hears of those that it has.

    before_forward(context)    an outermost forward has entered its phase
    called(unit)               a unit's forward begins, before anything is gathered for it
    gathering(unit)            its gather is issued
    filling(unit)              the gather of shards that replicas share out is issued
    computing(unit)            its full parameters are there, its forward computes next
    computed(unit)             its forward has computed, and a backward is to be expected
    releasing(unit)            a forward is over, its copy goes next
    released(unit)             the copy has gone
    after_forward(context)     an outermost forward is over, its phase is not left yet
    before_backward(backward)  a backward has entered its phase
    reached(unit)              the first gradient of an output of it is there, and none of its
                               parameters has got one before
    computing_backward(unit)   its backward computes next, once for each output; its full parameters
                               are there, unless the user has switched that off
    issued(unit, reductions)   its reductions are on their way
    delivered(unit)            the sum of one of its buckets is in `.grad`, or kept
    ending(backward)           its sums are delivered on this rank; again where backwards nest
    after_backward(context)    everything is at rest, the phase is not left yet
    ended(backward)            control is the user's again: who complains holds up no peer
    failed(context)            an exception ended a pass; units go to rest next
    weighing(context)          gradients are reduced outside of a backward

A forward that kept copies serve alone has no phase, and is told like others; one that runs again
inside a backward is told as `called`, with what is gathered and released for it. Listeners never
steer the kernel by what they return; they may call it (gather ahead, step a unit, set a weight). An
exception in one is an exception in the pass. They are told in the order in which they were
registered: `rings` lists those that come with the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAMES = (
    "before_forward",
    "called",
    "gathering",
    "filling",
    "computing",
    "computed",
    "releasing",
    "released",
    "after_forward",
    "before_backward",
    "reached",
    "computing_backward",
    "issued",
    "delivered",
    "ending",
    "after_backward",
    "ended",
    "failed",
    "weighing",
)

Tell = tuple[Callable[..., None], ...]

_makers: list[Callable[[], Any]] = []


def register(maker: Callable[[], Any]) -> None:
    """Contexts that are made from now on have a listener that `maker()` returns."""
    _makers.append(maker)


class Moments:
    """Of one context: for each moment, the bound methods to call."""

    __slots__ = ("_added", "_own", *NAMES)

    before_forward: Tell
    called: Tell
    gathering: Tell
    filling: Tell
    computing: Tell
    computed: Tell
    releasing: Tell
    released: Tell
    after_forward: Tell
    before_backward: Tell
    reached: Tell
    computing_backward: Tell
    issued: Tell
    delivered: Tell
    ending: Tell
    after_backward: Tell
    ended: Tell
    failed: Tell
    weighing: Tell

    def __init__(self) -> None:
        self._own = [maker() for maker in _makers]
        self._added: list[Any] = []  # later: they follow the units to another context
        self._bind()

    def add(self, listener: Any) -> None:
        """Tell one more, after the others."""
        self._added.append(listener)
        self._bind()

    def remove(self, listener: Any) -> None:
        self._added = [guest for guest in self._added if guest is not listener]
        self._bind()

    def take_over(self, other: Moments) -> None:
        """Units come from another context: who listened there listens here."""
        new = [g for g in other._added if all(g is not known for known in self._added)]
        if new:
            self._added += new
            self._bind()

    def _bind(self) -> None:
        listeners = (*self._own, *self._added)
        for name in NAMES:
            tell = (getattr(listener, name, None) for listener in listeners)
            setattr(self, name, tuple(method for method in tell if method is not None))
