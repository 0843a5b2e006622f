"""The state that a sharded module carries, and finding it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.nn as nn

from shardwise.engine.core.unit import Unit

STATE = "_shardwise_state"

# Runs a forward in its own way, where gradients are on: (unit, forward, args, kwargs) -> output.
Around = Callable[[Unit, Callable[..., Any], Any, Any], Any]


class ModuleState:
    """What one sharded module knows. Modules of one list share their unit."""

    __slots__ = ("around", "is_known", "methods", "original", "registrations", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.methods: list[str] = []  # run like forward, see `register_fsdp_forward_method`
        self.around: Around | None = None  # activations are recomputed, or move to the host
        self.is_known = False  # a root has taken this module in
        self.original: nn.Module | None = None  # of a shallow copy: its unit knows that one
        self.registrations = -1  # when its modules were last looked at, see `guards.changes`

    def on(self, unit: Unit) -> ModuleState:
        """The same state on the unit of a copy."""
        new = ModuleState(unit)
        new.around = self.around
        return new


# -- looking up ----------------------------------------------------------------------------------
def state_of(module: Any) -> ModuleState | None:
    """The state of a sharded module, None for others."""
    return module.__dict__.get(STATE) if isinstance(module, nn.Module) else None


def unit_of(module: Any) -> Unit:
    """The unit of a sharded module."""
    state = state_of(module)
    if state is None:
        raise ValueError(
            f"{type(module).__name__} is not sharded; call shardwise.fully_shard on it before"
        )
    return state.unit


def units_in(module: Any, recurse: bool = True) -> list[Unit]:
    """Units of a module and, with `recurse`, of all modules below it; each once, in module
    order.
    """
    modules: Sequence[Any] = list(module.modules()) if recurse else [module]
    found = {id(s.unit): s.unit for m in modules if (s := state_of(m)) is not None}
    return list(found.values())


def sharded_units(model: nn.Module) -> list[Unit]:
    """`units_in`; ValueError where there is none."""
    units = units_in(model)
    if not units:
        raise ValueError(
            f"{type(model).__name__} holds no sharded module; call shardwise.fully_shard before"
        )
    return units


def sharded_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module, ModuleState]]:
    """All sharded modules at and below `root`, with their names."""
    for name, module in root.named_modules():
        state = state_of(module)
        if state is not None:
            yield name, module, state


def units_of_modules(modules: Any) -> list[Unit]:
    for module in modules:
        if state_of(module) is None:
            raise ValueError(
                f"prefetch: expected FSDPModules, found {type(module).__name__}; call "
                f"fully_shard on it"
            )
    return [unit_of(m) for m in modules]
