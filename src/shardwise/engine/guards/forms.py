"""Places beside `_parameters` where modules keep parameters: `nn.LSTM` does in a list, others in
tuples, dicts, named tuples, dataclasses, plain attributes.

A parameter changes its form (shards at rest, full while its unit runs), and whoever keeps a form
that is not registered computes with old numbers. The rule: such a place shows what the parameter's
own slot shows. Places are looked for when a root takes modules in, and where a module's attributes
are looked at anyway (see `views`); lists and dicts are changed in place.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn

from shardwise._torch_compat import REGISTRY_KEY
from shardwise.engine.core.bucket import lies_over
from shardwise.engine.core.parameter import ShardedParam, home_of
from shardwise.engine.core.unit import Unit

OWN_NAMES = frozenset(vars(nn.Module()))  # that every module has
CONTAINERS = (list, tuple, dict, set, deque, types.SimpleNamespace)
FORM, VIEW = 1, 2  # what is found in an attribute: a full parameter itself, or a view of one
_DEPTH = 3  # of containers in containers
_MANY = 64  # entries of a container are not looked at in each step


class _KeptForms:
    """The attributes, by module and name, in which forms of a unit's parameters are kept."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, str], weakref.ref[nn.Module]] = {}

    def renew(self) -> None:
        """Let them show what is registered now."""
        for (_, key), ref in list(self.places.items()):
            module = ref()
            if module is not None and key in module.__dict__:
                module.__dict__[key] = _renewed(module.__dict__[key])


_KEPT: weakref.WeakKeyDictionary[Unit, _KeptForms] = weakref.WeakKeyDictionary()


def forget_forms(unit: Unit) -> None:
    """They are looked for anew."""
    if unit in _KEPT:
        unit.copy.when_shown.remove(_KEPT.pop(unit).renew)


def watch_forms(modules: Iterable[nn.Module]) -> None:
    """Find the attributes of modules that hold parameters; from now on they follow these."""
    for module in modules:
        for key, value in list(module.__dict__.items()):
            if could_hold(value) and is_users(key):
                watch_form(module, key)


def watch_form(module: nn.Module, key: str) -> None:
    """The same for one attribute."""
    homes = list(_homes_in(module.__dict__[key]))
    for unit in {id(u): u for home in homes if (u := home.unit()) is not None}.values():
        if unit not in _KEPT:
            _KEPT[unit] = _KeptForms()
            unit.copy.when_shown.append(_KEPT[unit].renew)
        _KEPT[unit].places[id(module), key] = weakref.ref(module)
    if homes:
        module.__dict__[key] = _renewed(module.__dict__[key])


def is_users(key: str) -> bool:
    """Whether an attribute of that name is neither torch's nor the engine's."""
    return key not in OWN_NAMES and not key.startswith(("_shardwise", REGISTRY_KEY))


def could_hold(value: Any) -> bool:
    """Whether there may be a tensor in it."""
    return isinstance(value, (torch.Tensor, *CONTAINERS)) or _is_record(value)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def items_of(value: Any) -> Collection[Any]:
    """What is in a container."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, types.SimpleNamespace) or _is_record(value):
        return getattr(value, "__dict__", {}).values()
    return value if isinstance(value, (list, tuple, set, deque)) else ()


def _homes_in(value: Any, depth: int = 0) -> Iterator[ShardedParam]:
    if isinstance(value, torch.Tensor):
        home = home_of(value)
        if home is not None:
            yield home
    elif depth < _DEPTH:
        for item in items_of(value):
            yield from _homes_in(item, depth + 1)


def _renewed(value: Any, depth: int = 0) -> Any:
    """`value` with the registered forms of parameters in it; itself, unless it is a tensor or a
    tuple.
    """
    if isinstance(value, torch.Tensor):
        home = home_of(value)
        return value if home is None else home.shown(value)
    if depth == _DEPTH or not could_hold(value):
        return value
    items = list(items_of(value))
    new = [_renewed(item, depth + 1) for item in items]
    if all(a is b for a, b in zip(items, new, strict=True)):
        return value
    if isinstance(value, tuple):
        return value._make(new) if hasattr(value, "_make") else type(value)(new)
    if isinstance(value, set):
        value.clear()
        value.update(new)
    elif isinstance(value, (list, deque)):
        for i, item in enumerate(new):
            value[i] = item
    else:
        held = value if isinstance(value, dict) else value.__dict__
        held.update(zip(held, new, strict=True))
    return value


def over(value: Any, storages: set[int], depth: int = 0) -> int:
    """What of the storages is found in a value, at worst."""
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        if not lies_over(value, storages):
            return 0
        home = home_of(value)
        return FORM if home is not None and home.is_form(value) else VIEW
    if depth < 2:
        items = items_of(value)
        if len(items) <= _MANY:
            return max((over(v, storages, depth + 1) for v in items), default=0)
    return 0
