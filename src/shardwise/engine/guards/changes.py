"""Parameters that come, move or go after sharding: adapters, parametrizations, pruning.

torch calls a hook whenever a module gets a parameter or a sub-module. The hooks here only count,
so a root compares two numbers per call and walks its modules when something was registered since:

    plain parameter in a unit's territory      sharded into that unit, values of the first rank
    known parameter under another name         keeps its shard, gets the new slot (pruning)
    parameter of another unit                  a tie to it
    parameter that no module holds any more    leaves the unit

The territory of a unit is what `fully_shard` would have given it: its modules without those that
are sharded themselves. Idea: torch.nn.modules.module's global registration hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise._torch_compat import in_functional_call
from shardwise.engine.core.build import Found, Tie, check_tie, own_modules
from shardwise.engine.core.parameter import ShardedParam, Slot, home_of
from shardwise.engine.core.unit import Unit
from shardwise.engine.core.upkeep import admit_guests, forget_dead_slots, held_in, lay_out
from shardwise.engine.guards.audit import synchronize
from shardwise.engine.mesh.spread import plain_spread, spread_of
from shardwise.engine.tensor.shard_tensor import ShardTensor
from shardwise.errors import EngineError

IsSharded = Callable[[nn.Module], bool]


class Registrations:
    """How often any module got a parameter or sub-module, in this process."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, *_: Any) -> None:
        """The signature of both hooks; None leaves what is registered as it is."""
        self.count += 1


REGISTRATIONS = Registrations()


@functools.cache
def watch_registrations() -> None:
    """Count from now on. Once in a process."""
    register_module_parameter_registration_hook(REGISTRATIONS.note)
    register_module_module_registration_hook(REGISTRATIONS.note)


def take_in_changes(unit: Unit, units: list[Unit], is_sharded: IsSharded) -> bool:
    """Let a unit at rest manage what its modules hold now. True when that was something new. Its
    root has `units`. What `functional_call` has put into a slot that any of them knows is not new.
    """
    forget_dead_slots(unit)
    admit_guests(unit)
    known, new, ties = _sorted_slots(unit, units, is_sharded)
    found = []
    for param in unit.params:
        slots = known.get(param) or _slots_of_replacement(param)
        if slots:
            found.append(Found.again(param, held_in(unit, slots[0], param), slots))
    before = {(id(s[0]), s[1]) for p in unit.params for s in p.slots}
    after = {(id(s[0]), s[1]) for f in found for s in f.slots}
    if not new and not ties and before == after and len(found) == len(unit.params):
        return False
    for param in unit.params:
        check_tie(param)
    _check_unused(unit, new)
    whole = [f for f in new if type(f.param) is not ShardTensor]  # shards differ as they should
    for axes in dict.fromkeys(f.mesh.axes for f in whole):
        alike = [f for f in whole if f.mesh.axes == axes]
        synchronize([(f.name, f.param) for f in alike], alike[0].mesh)
    lay_out(unit, [*found, *new])
    unit.tie(ties)
    return True


def _sorted_slots(
    unit: Unit, units: list[Unit], is_sharded: IsSharded
) -> tuple[dict[ShardedParam, list[Slot]], list[Found], list[Tie]]:
    """Slots of the unit's own parameters, new parameters, and those of other units."""
    units = [*unit.context.units, *units]
    is_call = in_functional_call()
    lent = {(id(s[0]), s[1]): p for u in units if is_call for p in u.params for s in p.slots}
    forms = {id(t): p for u in units for p in u.params for t in (p.sharded, p.full, p.between)}
    forms.pop(id(None), None)
    replaced = {(id(s[0]), s[1]) for p in unit.params for s in p.slots}
    known: dict[ShardedParam, list[Slot]] = {}
    new: dict[int, Found] = {}
    ties: list[Tie] = []
    for name, slot, held in _territory(unit, is_sharded):
        home = lent.get((id(slot[0]), slot[1])) or forms.get(id(held)) or home_of(held)
        if home is not None and home in unit.params and (is_call or home.is_form(held)):
            known.setdefault(home, []).append(slot)
        elif (id(slot[0]), slot[1]) in replaced or id(held) in unit.ignored:
            continue  # another tensor under a known name: `upkeep.refresh` takes it
        elif home is not None:
            if all(s[0] is not slot[0] or s[1] != slot[1] for s in home.slots):
                ties.append((home, slot))
        elif id(held) in new:
            new[id(held)].slots.append(slot)
        else:
            new[id(held)] = _new(unit, name, slot, held)
    for param, slots in known.items():  # slots in modules of other units, by ties
        there = {(id(s[0]), s[1]) for s in slots}
        for slot in param.slots:
            is_held = is_call or param.is_form(slot[0].get(slot[1]))
            if (id(slot[0]), slot[1]) not in there and is_held:
                slots.append(slot)
    return known, list(new.values()), ties


def _new(unit: Unit, name: str, slot: Slot, held: nn.Parameter) -> Found:
    """A parameter that the unit does not know; what was computed from shards is one already."""
    dim, mesh, own = unit.plan.place_of(name, held)
    if type(held) is not ShardTensor:
        return Found(name, held, [slot], dim, mesh, spread_of(name, held, dim, mesh, own))
    if held.device_mesh != mesh.mesh:
        raise NotImplementedError(
            f"{name}: was computed from sharded parameters over {held.device_mesh} and added to "
            f"the unit {unit.name!r}, which shards over {mesh.mesh}; add it before fully_shard"
        )
    return Found(name, held, [slot], dim, mesh, plain_spread(held.shape, dim, mesh, own))


def _territory(unit: Unit, is_sharded: IsSharded) -> Iterator[tuple[str, Slot, nn.Parameter]]:
    modules = [module for ref in unit.modules if (module := ref()) is not None]
    for position, module in enumerate(modules):
        prefix = f"{position}." if len(modules) > 1 else ""
        for name, owner in own_modules(module, prefix, is_sharded):
            for key, held in owner._parameters.items():
                if held is not None:
                    yield f"{name}{key}", (owner._parameters, key), held


def _slots_of_replacement(param: ShardedParam) -> list[Slot]:
    """Slots where another tensor was put in the place of a parameter."""
    return [s for s in param.slots if s[0].get(s[1]) is not None]


def _check_unused(unit: Unit, new: list[Found]) -> None:
    for f in new:
        if f.param.grad is not None:
            raise EngineError(
                f"{f.name}: was added to the sharded unit {unit.name!r} and has got a gradient "
                "before the model's next forward, which takes new parameters in; that gradient is "
                "this rank's alone. Add parameters before the forward that uses them, and clear "
                "this one's gradient (parameter.grad = None)"
            )


def check_nothing_added(units: list[Unit], is_sharded: IsSharded) -> None:
    """After a forward: a parameter that it added would get gradients of this rank alone."""
    # Of all units: a slot may be tied to another one's parameter.
    slots = {(id(s[0]), s[1]) for unit in units for p in unit.params for s in p.slots}
    for unit in units:
        for name, slot, held in _territory(unit, is_sharded):
            is_new = (id(slot[0]), slot[1]) not in slots and id(held) not in unit.ignored
            if is_new and held.requires_grad and torch.is_grad_enabled():
                raise EngineError(
                    f"{name}: was added to the sharded unit {unit.name!r} while its forward ran; "
                    "the engine takes new parameters in at the start of a forward, so the "
                    "gradient of this pass would be this rank's alone. Add it before the forward"
                )
