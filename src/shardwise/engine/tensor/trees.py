"""Tensors inside of what modules are called with and return: in lists, tuples, named tuples, dicts
(and subclasses, transformers' ModelOutput), dataclasses, objects with a `__dict__`.

torch's pytree knows classes that were registered; a user's own output is found here without.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

# What ends a walk.
_LEAVES = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MAX_DEPTH = 12


def tensors_in(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in `tree`, in order. Objects of unknown classes are searched too."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, _LEAVES) or depth > _MAX_DEPTH:
        return
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for item in tree:
            yield from tensors_in(item, depth + 1)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item, depth + 1)
    elif (
        hasattr(tree, "__dict__")
        and not isinstance(tree, (type, torch.nn.Module))
        and not callable(tree)
    ):
        yield from tensors_in(vars(tree), depth + 1)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):  # with slots
        for f in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, f.name), depth + 1)


def may_hide_tensors(out: Any) -> bool:
    """True for outputs without a visible tensor that may still hold one: closures, generators,
    objects with slots. No hook reaches those.
    """
    return not _holds_none(out) and next(tensors_in(out), None) is None


def _holds_none(out: Any) -> bool:
    if isinstance(out, (list, tuple, set, frozenset, dict)):
        items = out.values() if isinstance(out, dict) else out
        return all(_holds_none(item) for item in items)
    return isinstance(out, _LEAVES)


def map_tensors(tree: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`tree` with `fn` applied to its tensors; containers are rebuilt only when something in them
    changed.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, _LEAVES):
        return tree
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(item, fn) for item in tree]
        if all(a is b for a, b in zip(items, tree, strict=True)):
            return tree
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        return type(tree)(items)
    if isinstance(tree, dict):
        return _map_dict(tree, fn)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(tree, fn)
    return tree


def _map_dict(tree: dict[Any, Any], fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    items = {key: map_tensors(value, fn) for key, value in tree.items()}
    if all(items[key] is tree[key] for key in tree):
        return tree
    if type(tree) is dict:
        return items
    out = copy.copy(tree)
    for key, value in items.items():
        out[key] = value
    return out


def _map_dataclass(tree: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    out = tree
    for f in dataclasses.fields(tree):
        value = getattr(tree, f.name, None)
        mapped = map_tensors(value, fn)
        if mapped is not value:
            if out is tree:
                out = copy.copy(tree)
            object.__setattr__(out, f.name, mapped)  # frozen ones too: `out` is our own copy
    return out


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of `tree` in `dtype`."""

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t

    return map_tensors(tree, cast)
