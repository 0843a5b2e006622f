"""Upkeep: a unit follows what its modules hold, between steps.

`to`, `load_state_dict(assign=True)`, a weight set anew, `functional_call`: somebody has put another
tensor in the place of a parameter, or moved, cast, added or removed one. Before the unit runs it is
looked at what the modules hold now, and where that is new it is laid out and moved anew (`build`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn as nn

from shardwise.engine.core.build import Found, Tie, check_tie
from shardwise.engine.core.guests import guests_of, take_back
from shardwise.engine.core.parameter import ShardedParam, Slot, home_of
from shardwise.errors import EngineError

if TYPE_CHECKING:
    from shardwise.engine.core.unit import Unit


def refresh(unit: Unit, *, check_ties: bool = True) -> None:
    """Pick up parameters that were moved, cast or replaced since; does nothing when none
    was. `check_ties` is False after `_apply`, which replaces tied parameters one by one.
    """
    is_empty = follow_ties(unit)
    admit_guests(unit)
    if is_empty or not all(b.is_current() for b in unit.buckets):
        for param in unit.params if check_ties else ():
            check_tie(param)
        rebuild(unit)


def follow_ties(unit: Unit) -> bool:
    """A slot into which somebody has put another parameter of ours (`head.weight = embed.weight`)
    belongs to that one from here on. True when a parameter has no slot left.
    """
    ties: list[Tie] = []
    for bucket in unit.buckets:
        for param in bucket.params:
            found = [(home, slot) for slot in param.slots if (home := _home_in(slot, param))]
            if found:
                moved = {id(slot) for _, slot in found}
                param.slots = [slot for slot in param.slots if id(slot) not in moved]
                bucket.forget_places()
                ties += found
    if ties:
        unit.tie(ties)
    return any(not param.slots for param in unit.params)


def _home_in(slot: Slot, param: ShardedParam) -> ShardedParam | None:
    """The other parameter whose form is in a slot of `param`."""
    held = slot[0].get(slot[1])
    home = None if held is None or param.is_form(held) else home_of(held)
    if home is None or home is param:
        return None
    owner = home.unit()
    return home if owner is not None and any(home is p for p in owner.params) else None


def admit_guests(unit: Unit) -> None:
    """Leave alone what `functional_call` has put in the place of parameters."""
    for bucket in unit.buckets:
        if bucket.left:
            take_back(bucket)
        bucket.guests = guests_of(bucket)


def rebuild(unit: Unit) -> None:
    """Lay out and move what the modules hold now."""
    found = []
    for param in unit.params:
        slot = next((s for s in param.slots if s[0].get(s[1]) is not None), None)
        if slot is not None:  # else no module has it any more
            found.append(Found.again(param, held_in(unit, slot, param), param.slots))
    on_meta = {f.param.is_meta for f in found}
    if len(on_meta) > 1:
        return  # half of them are materialised; the other half follows
    lay_out(unit, found)


def held_in(unit: Unit, slot: Slot, param: ShardedParam) -> nn.Parameter:
    """What was put in the place of a parameter for good, or else the parameter."""
    held = slot[0][slot[1]]
    is_lent = any(guest.is_in(slot) for bucket in unit.buckets for guest in bucket.guests)
    return param.sharded if is_lent or param.is_form(held) else held


def lay_out(unit: Unit, found: list[Found]) -> None:
    """Manage `found` from now on, in new buffers. What is one tensor in several slots is tied."""
    forget_dead_slots(unit)
    tied: dict[int, Found] = {}
    for f in found:
        first = tied.setdefault(id(f.param), f)
        if first is not f:
            first.slots = [*first.slots, *f.slots]
    found = list(tied.values())
    unit.gradients.agree_on_flags()
    if any(g.has_partial for g in unit.gradients.buckets):
        unit.settle_partials()  # what was added up lies in the old layout
    if unit.copy.is_there:
        unit.reshard()
    unit.gradients.route.failed()  # what it has collected does not fit the new layout
    unit.mark.count += 1
    unit.mark.moved = False
    before = [(param.full, param.sharded) for param in unit.params]
    guests = [guest for bucket in unit.buckets for guest in bucket.guests]
    unit.build(found)
    for guest in guests:
        guest.rest()
    if guests:
        admit_guests(unit)
    now = {id(param.sharded): param for param in unit.params}
    for full, sharded in before:  # an optimizer may hold the gathered form of before
        if full is not None and id(sharded) in now:
            now[id(sharded)].settle_home(full)


def owner_of(unit: Unit, param: ShardedParam) -> nn.Module:
    """The module that holds a parameter."""
    roots = [root for ref in unit.modules if (root := ref()) is not None]
    for module in (m for root in roots for m in root.modules()):
        if any(held is module._parameters for held, _ in param.slots):
            return module
    raise EngineError(
        f"{param.name}: no module of the unit {unit.name!r} holds it any more; call "
        "fully_shard after the model has got its final modules"
    )


def forget_dead_slots(unit: Unit) -> None:
    """Leave alone what modules do not have any more: registering would bring it back."""
    follow_ties(unit)
    for bucket in unit.buckets:
        if bucket.left:
            take_back(bucket)
        for param in bucket.params:
            slots = [s for s in param.slots if s[0].get(s[1]) is not None]
            if len(slots) != len(param.slots):
                param.slots = slots
                bucket.forget_places()


def catch_up(unit: Unit, *, check_ties: bool = True) -> None:
    """Take what was put in the place of a parameter before registering would undo it."""
    forget_dead_slots(unit)
    if not unit.is_registered():
        refresh(unit, check_ties=check_ties)
