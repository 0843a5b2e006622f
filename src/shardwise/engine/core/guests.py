"""Guests: tensors that `torch.func.functional_call` has put in the place of parameters.

They belong to the user, for one call: fast weights of meta-learning, an ensemble's members, an
average. The forward uses them, gradients go to them alone, and the engine only sees to it that
registering its own forms does not push them out. Any other tensor that is found in a parameter's
place was put there for good, and its values are taken over (`upkeep.refresh`).

Sharded tensors that need a gradient are refused: the engine would have to gather them in a way that
autograd can follow. Those that need none are taken over, and the parameters afterwards again.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import in_functional_call

if TYPE_CHECKING:
    from shardwise.engine.core.bucket import BucketState
    from shardwise.engine.core.parameter import ShardedParam, Slot
    from shardwise.layout import BucketLayout


class Guest:
    """One tensor in one slot: what the user has put there, and the form in which modules use it."""

    __slots__ = ("_served", "slot", "tensor")

    def __init__(self, slot: Slot, tensor: torch.Tensor, layout: BucketLayout) -> None:
        self.slot = slot
        self.tensor = tensor
        is_cast = layout.needs_cast and tensor.is_floating_point()
        self._served = tensor.to(layout.gather_dtype) if is_cast else tensor

    def is_in(self, slot: Slot) -> bool:
        held = slot[0].get(slot[1])
        return held is not None and (held is self.tensor or held is self._served)

    def serve(self) -> None:
        """The unit runs: in the dtype that its policy says."""
        self.slot[0][self.slot[1]] = self._served

    def rest(self) -> None:
        """The very tensor: `functional_call` hands back what it finds."""
        self.slot[0][self.slot[1]] = self.tensor


class Left:
    """A guest whose call is over. Where a module has two names in the model torch leaves it behind:
    under the second name it puts back what it found there, which is the guest.
    """

    __slots__ = ("_slot", "_tensor")

    def __init__(self, guest: Guest) -> None:
        self._slot = guest.slot
        self._tensor = weakref.ref(guest.tensor)

    def give_way(self, state: BucketState) -> None:
        parameters, name = self._slot
        if parameters.get(name) is not self._tensor():
            return
        unit = state.unit()
        for param in state.params:
            if any(d is parameters and key == name for d, key in param.slots):
                is_full = unit is not None and unit.copy.is_there and not unit.copy.shows_shards
                parameters[name] = param.full if is_full else param.sharded


def end_of_call(state: BucketState) -> None:
    """The outermost forward is over; what modules hold stays until `functional_call` is."""
    if in_functional_call():
        state.left += map(Left, state.guests)
    state.guests = []


def take_back(state: BucketState) -> None:
    """Parameters come back to where `functional_call` did not put them back."""
    if not in_functional_call():
        left, state.left = state.left, []
        for guest in left:
            guest.give_way(state)


def guests_of(state: BucketState) -> list[Guest]:
    """What modules hold in the place of a bucket's parameters now, for a call."""
    if all(map(_is_own, state.params)):
        return []
    is_call = in_functional_call()
    found = [
        (param, slot, held)
        for param in state.params
        for slot in param.slots
        if (held := slot[0].get(slot[1])) is not None and not param.is_form(held)
    ]
    guests = [f for f in found if _is_guest(f[0], f[2], is_call)]
    if guests and len(guests) < len(found):
        taken = next(f for f in found if all(f is not g for g in guests))
        raise NotImplementedError(
            f"functional_call with a sharded tensor for {taken[0].name} and a whole one for "
            f"{guests[0][0].name}: pass whole plain tensors for both (.full_tensor())"
        )
    return [Guest(slot, held, state.layout) for _, slot, held in guests]


def _is_own(param: ShardedParam) -> bool:
    return all(param.is_form(parameters.get(name)) for parameters, name in param.slots)


def _is_guest(param: ShardedParam, held: torch.Tensor, is_call: bool) -> bool:
    if isinstance(held, nn.Parameter) and not is_call:
        return False  # assigned
    if not isinstance(held, DTensor) and param.spread.whole is None:
        return True
    if held.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{param.name}: functional_call with a sharded tensor that needs a gradient (shape "
            f"{tuple(held.shape)}); pass whole plain tensors instead, e.g. made of "
            "parameter.full_tensor(), or detached ones"
        )
    return False
