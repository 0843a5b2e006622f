"""Tensors that user code keeps of gathered parameters: `self.cache = self.weight[:2]`.

They lie in memory that the engine empties when the unit comes to rest; some kernels crash when they
read it. Two ways find them before:

    attributes    of the unit's modules are looked at before each release: an error that names
                  module and attribute. Only names that could hold a tensor are looked at, so that
                  the usual module costs one comparison
    use counts    where autograd keeps nothing of the copy (behind a backward, or a forward without
                  grad), a storage with more users than after its first gather is left to them:
                  what they hold stays readable and shows the weights of that pass; the engine goes
                  on with memory of its own

Views that live elsewhere (a list, a closure) and are read between forward and backward are found by
neither, since autograd's own views cannot be told from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

from shardwise._torch_compat import REGISTRY_KEY

_OWN = frozenset(vars(nn.Module()))  # names that every module has
_CONTAINERS = (list, tuple, dict, set)


class Attributes:
    """Of the modules of one unit: those that hold, or could hold, a tensor. Modules are held
    weakly: a model that is deleted frees its memory at once.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = [(name, weakref.ref(module)) for name, module in modules]
        self._num_names = -1
        self._suspects: list[tuple[str, weakref.ref[nn.Module], str]] = []

    @property
    def could_hold(self) -> bool:
        """Whether any attribute is worth a look."""
        num_names = 0
        for _, ref in self._modules:
            module = ref()
            if module is not None:
                num_names += len(module.__dict__)
        if num_names != self._num_names:
            self._look_anew(num_names)
        return bool(self._suspects)

    def view_of(self, storages: set[int]) -> str | None:
        """ "module.attribute" of a tensor over one of the storages (data pointers), of what
        `could_hold` found.
        """
        for where, ref, key in self._suspects:
            module = ref()
            if module is not None and is_over(module.__dict__.get(key), storages):
                return where
        return None

    def _look_anew(self, num_names: int) -> None:
        self._num_names = num_names
        self._suspects = []
        for name, ref in self._modules:
            module = ref()
            if module is None:
                continue
            for key, value in vars(module).items():
                if key in _OWN or key.startswith(("_shardwise", REGISTRY_KEY)):
                    continue
                if value is None or isinstance(value, (torch.Tensor, *_CONTAINERS)):
                    where = f"{name}.{key}" if name else key
                    self._suspects.append((where, ref, key))


def is_over(value: Any, storages: set[int], depth: int = 0) -> bool:
    """Whether a tensor, or one in a container, lies in one of the storages (data pointers)."""
    if value is None:
        return False
    if isinstance(value, torch.Tensor):
        try:
            return value.untyped_storage().data_ptr() in storages
        except (NotImplementedError, RuntimeError):  # meta, sparse, subclasses without storage
            return False
    if depth < 2 and isinstance(value, _CONTAINERS) and len(value) <= 64:
        values = value.values() if isinstance(value, dict) else value
        return any(is_over(v, storages, depth + 1) for v in values)
    return False
