"""The ledger of a step: what one bucket saw between two ends of a backward, checked at each end.

Kept where things happen, by those who do them, so that one that forgets does not agree with the
others:

    told        autograd's hook: a gradient is in the accumulator            (mask of parameters)
    num_told    ... how often
    num_taken   a gradient went into a reduction or a partial sum            (how often)
    waiting     ... into a reduction that was not issued yet                 (mask)
    lost        ... but its buffer does not have it when it is issued        (mask)
    issued, delivered     reductions issued; reductions whose result reached `.grad` or was kept
    repeated    reductions of one backward that had nothing new in them

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
    released                   no copy outlives the backward, unless the strategy, a setting or
                               create_graph keeps it

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
    from shardwise.engine.core.bucket import BucketState
    from shardwise.engine.core.gradients import BucketGrads
    from shardwise.engine.core.parameter import ShardedParam
    from shardwise.engine.core.unit import Unit

_REMEDY = (
    "The gradients of this step are not right: zero_grad() and run the step again; if it comes "
    "again, please report it with this text"
)


class Ledger:
    """See the module docstring. One for each bucket; masks have bit i for parameter i."""

    __slots__ = (
        "delivered",
        "issued",
        "lost",
        "num_taken",
        "num_told",
        "repeated",
        "told",
        "trainable",
        "waiting",
    )

    def __init__(self) -> None:
        self.trainable = 0  # of the last forward
        self.clear()

    def clear(self) -> None:
        """A backward is over, by its end or by an exception."""
        self.told = self.num_told = self.num_taken = self.waiting = self.lost = 0
        self.issued = self.delivered = self.repeated = 0

    @property
    def is_settled(self) -> bool:
        """All rules that need no look at parameters hold, and every gradient was told."""
        return (
            self.num_told == self.num_taken
            and not self.waiting
            and not self.lost
            and self.issued == self.delivered
            and not self.repeated
            and self.told == self.trainable
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
        for grads in unit.grads
        if grads.ledger.num_taken
        for i, param in enumerate(grads.state.params)
        if grads.ledger.told >> i & 1 and _is_added(param, grads.ledger.delivered)
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


def check_units(reached: Iterable[Unit], expected: Iterable[Unit]) -> None:
    """Raise EngineError with everything that the ledgers of these units complain about, then begin
    them anew.

    Args:
        reached: units that this backward went through.
        expected: units whose forward ran and that it did not reach, as far as the engine knows.
    """
    complaints: list[str] = []
    for unit in reached:
        for grads in unit.grads:
            ledger = grads.ledger
            if not ledger.is_settled or (unit.requires_sync and not ledger.issued):
                complaints += _complaints(unit, grads)
            ledger.clear()
            if grads.buffer is not None:
                grads.discard()  # what is left over must not join the next step's
        if unit.is_held and unit.should_be_released:
            complaints.append(
                f"unit {unit.name!r} is still gathered after its backward, and its strategy "
                f"({unit.strategy.name}) releases it"
            )
    for unit in expected:
        for grads in unit.grads:
            complaints += _unheard(grads)
    if complaints:
        raise EngineError(f"rank {_rank()}: " + "; ".join(complaints) + f". {_REMEDY}")


def _complaints(unit: Unit, grads: BucketGrads) -> list[str]:
    state, ledger = grads.state, grads.ledger
    found = _unheard(grads)
    if ledger.num_told != ledger.num_taken:
        found.append(
            f"{state.name}: {ledger.num_told} gradients arrived ({_names(state, ledger.told)}), "
            f"{ledger.num_taken} were collected: one was dropped, or counted twice"
        )
    for mask, what in ((ledger.waiting, "not reduced"), (ledger.lost, "lost before the reduction")):
        if mask:
            found.append(f"gradients of {_names(state, mask)} were collected and {what}")
    if ledger.issued != ledger.delivered:
        found.append(
            f"{state.name}: {ledger.issued} reductions were issued, {ledger.delivered} delivered "
            f"to .grad of {_names(state, ledger.trainable)}"
        )
    if ledger.repeated:
        found.append(
            f"{state.name}: reduced {ledger.repeated + 1} times in one backward without a new "
            f"gradient ({_names(state, ledger.trainable)})"
        )
    if unit.requires_sync and not ledger.issued and grads.trainable_layout().indices:
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
