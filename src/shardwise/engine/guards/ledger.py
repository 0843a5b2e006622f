"""The ledger of a step: the tallies of its buckets, checked at each end of a backward.

Rules at the end of a backward, for units that it reached:

    num_told == num_taken      no gradient was dropped, none was added twice
    waiting == lost == 0       what was taken was reduced
    issued == delivered        what was reduced arrived, once
    repeated == 0              no collective for nothing (peers would have to issue it too)
    issued > 0                 a reached unit with sync was reduced: peers wait for it
    accumulators are empty     a gradient that autograd delivered and nobody was told of; looked at
                               only where `told` misses a trainable parameter, so the usual step
                               looks at none. Holds too for units whose forward ran and that the
                               backward seems not to have reached
    released                   no copy is there that nobody holds

Not a rule: a forward without a backward (evaluation with gradients on, an output that the loss
does not use, a graph kept for another loss). A backward that went through a unit without our
knowledge leaves gradients in accumulators, which is a rule.

The usual step costs a few comparisons of ints for each bucket.

A backward that an exception ended may have added to some gradients and not to others. What it has
touched is kept in mind (`Torn`); the next backward that ends while those gradients are still there
is refused, since their sum is that of no batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardwise._torch_compat import local_of
from shardwise.errors import EngineError

if TYPE_CHECKING:
    from shardwise.engine.core.backward import BackwardPass
    from shardwise.engine.core.bucket import BucketState
    from shardwise.engine.core.context import Context
    from shardwise.engine.core.gradients import BucketGrads
    from shardwise.engine.core.parameter import ShardedParam
    from shardwise.engine.core.unit import Unit

_REMEDY = (
    "The gradients of this step are not right: zero_grad() and run the step again; if it comes "
    "again, please report it with this text"
)


class Torn:
    """A gradient to which a backward has added that an exception ended."""

    __slots__ = ("_grad", "_param", "_version", "name")

    def __init__(self, param: ShardedParam) -> None:
        self.name = param.name
        self._param, self._grad = weakref.ref(param), param.sharded.grad
        self._version = _version_of(self._grad)

    @property
    def param(self) -> ShardedParam | None:
        return self._param()

    @property
    def is_there(self) -> bool:
        """Nobody has cleared it since, by `zero_grad()` of either kind or by another tensor."""
        param = self.param
        if param is None or self._grad is None or param.sharded.grad is not self._grad:
            return False
        if param.partial_grad is self._grad:
            return True
        return _version_of(self._grad) == self._version and bool(local_of(self._grad).any())


def _version_of(grad: Any) -> int:
    return -1 if grad is None else local_of(grad)._version


def torn_in(unit: Unit) -> list[Torn]:
    """What an exception in a backward leaves half done. Before the unit is put to rest."""
    return [
        Torn(param)
        for grads in unit.gradients.buckets
        if grads.tally.num_taken
        for i, param in enumerate(grads.state.params)
        if grads.tally.told >> i & 1 and _is_added(param, grads.tally.delivered)
    ]


def _is_added(param: ShardedParam, delivered: int) -> bool:
    """The gradient of this backward is in `.grad`, or in what `.grad` stands for."""
    grad = param.sharded.grad
    if grad is None:
        return False
    return param.partial_grad is grad or (bool(delivered) and bool(local_of(grad).any()))


def still_torn(torn: list[Torn]) -> list[Torn]:
    """At the start of a backward: those that nobody has cleared."""
    return [t for t in torn if t.is_there]


def refresh(torn: list[Torn]) -> list[Torn]:
    """The same gradients after another backward has added to them."""
    return [Torn(param) for t in torn if (param := t.param) is not None]


def torn_error(torn: list[Torn]) -> EngineError:
    names = ", ".join(t.name for t in torn[:8]) + (" ..." if len(torn) > 8 else "")
    return EngineError(
        f"rank {_rank()}: the gradients of {names} hold a part of a backward that an exception "
        "ended, others do not; their sum is that of no batch. Call zero_grad() after the "
        "exception, and run the whole step (all micro-batches) again"
    )


class Ledgers:
    """Listens: looks at the tallies of a backward when control is the user's again."""

    def __init__(self) -> None:
        self._torn: list[Torn] = []  # gradients that an exception left half done
        self._mixed: list[Torn] = []  # those that the backward under way adds to

    def before_backward(self, _backward: BackwardPass) -> None:
        if self._torn:
            self._mixed, self._torn = still_torn(self._torn), []

    def failed(self, context: Context) -> None:
        if context.backward is not None:
            self._torn += self._mixed
            self._mixed = []
            for unit in context.units:
                self._torn += torn_in(unit)

    def ended(self, backward: BackwardPass) -> None:
        """Was everything that this backward brought reduced, delivered, released?"""
        mixed, self._mixed = self._mixed, []
        self._torn += refresh(mixed)
        touched = backward.touched
        kept = (
            backward.creates_graph
        )  # nothing is released before the outermost plain backward ends
        order = () if kept else backward.context.order
        ran = (u for ref in order if (u := ref()) is not None)
        check_units(touched, (u for u in ran if u not in touched))
        if mixed:
            raise torn_error(mixed)


def check_units(reached: Iterable[Unit], expected: Iterable[Unit]) -> None:
    """Raise EngineError with everything that the ledgers of these units complain about, then begin
    them anew.

    Args:
        reached: units that this backward went through.
        expected: units whose forward ran and that it did not reach, as far as the engine knows.
    """
    complaints: list[str] = []
    for unit in reached:
        for grads in unit.gradients.buckets:
            tally = grads.tally
            if not tally.is_settled or (unit.settings.requires_sync and not tally.issued):
                complaints += _complaints(unit, grads)
            tally.clear()
            if grads.buffer is not None:
                grads.discard()  # what is left over must not join the next step's
        if unit.copy.is_there and not unit.copy.holds:
            complaints.append(
                f"unit {unit.name!r} is still gathered after its backward, and its strategy "
                f"({unit.strategy.name}) releases it"
            )
    for unit in expected:
        for grads in unit.gradients.buckets:
            complaints += _unheard(grads)
    if complaints:
        raise EngineError(f"rank {_rank()}: " + "; ".join(complaints) + f". {_REMEDY}")


def _complaints(unit: Unit, grads: BucketGrads) -> list[str]:
    state, tally = grads.state, grads.tally
    found = _unheard(grads)
    if tally.num_told != tally.num_taken:
        found.append(
            f"{state.name}: {tally.num_told} gradients arrived ({_names(state, tally.told)}), "
            f"{tally.num_taken} were collected: one was dropped, or counted twice"
        )
    for mask, what in ((tally.waiting, "not reduced"), (tally.lost, "lost before the reduction")):
        if mask:
            found.append(f"gradients of {_names(state, mask)} were collected and {what}")
    if tally.issued != tally.delivered:
        found.append(
            f"{state.name}: {tally.issued} reductions were issued, {tally.delivered} delivered "
            f"to .grad of {_names(state, tally.trainable)}"
        )
    if tally.repeated:
        found.append(
            f"{state.name}: reduced {tally.repeated + 1} times in one backward without a new "
            f"gradient ({_names(state, tally.trainable)})"
        )
    if unit.settings.requires_sync and not tally.issued and grads.trainable_layout().indices:
        found.append(
            f"unit {unit.name!r} was reached by the backward and {state.name} was not reduced; "
            "ranks that reduced it wait for this one"
        )
    return found


def _unheard(grads: BucketGrads) -> list[str]:
    """Gradients that autograd has put into an accumulator without the engine being told."""
    left = [p for p in grads.state.params if p.full.grad is not None]
    for param in left:
        param.full.grad = None  # it would be added to the next step's
    return [
        f"the gradient of {param.name} is in its accumulator and the engine was not told (its hook "
        "on the gathered parameter did not run)"
        for param in left
    ]


def _names(state: BucketState, mask: int) -> str:
    names = [p.name for i, p in enumerate(state.params) if mask >> i & 1]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
