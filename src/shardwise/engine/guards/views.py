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

import torch.nn as nn

from shardwise.engine.core.unit import Unit
from shardwise.engine.guards import forms
from shardwise.errors import EngineError

_ATTRIBUTES: weakref.WeakKeyDictionary[Unit, Attributes] = weakref.WeakKeyDictionary()


def watch_attributes(unit: Unit, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Look at the attributes of these modules, with their names, which are a unit's."""
    _ATTRIBUTES[unit] = Attributes(modules)


class Views:
    """Listens: attributes that got parameters follow these, and one that looks into memory which is
    released now is an error.
    """

    def called(self, unit: Unit) -> None:
        attributes = _ATTRIBUTES.get(unit)
        if attributes is not None and attributes.could_hold:
            attributes.watch_forms()

    def releasing(self, unit: Unit) -> None:
        attributes = _ATTRIBUTES.get(unit)
        if attributes is None or not unit.copy.is_there or not attributes.could_hold:
            return
        where = attributes.view_of(unit.addresses())
        if where is not None:
            raise EngineError(
                f"{where}: is a view of the gathered parameters of the unit {unit.name!r}, which "
                "are released now; keep a copy instead (.clone()), read it inside the forward "
                "only and set it to None before it ends, or keep the parameters gathered "
                "(strategy='shard_grad_op', reshard_after_forward=False)"
            )


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
        `could_hold` found. Full parameters themselves are watched from now on.
        """
        for where, ref, key in self._suspects:
            module = ref()
            found = 0 if module is None else forms.over(module.__dict__.get(key), storages)
            if found == forms.VIEW:
                return where
            if found == forms.FORM and module is not None:
                forms.watch_form(module, key)
        return None

    def watch_forms(self) -> None:
        """Attributes that got parameters at rest follow these from now on."""
        for _, ref, key in self._suspects:
            module = ref()
            if module is not None and module.__dict__.get(key) is not None:
                forms.watch_form(module, key)

    def _look_anew(self, num_names: int) -> None:
        self._num_names = num_names
        self._suspects = []
        for name, ref in self._modules:
            module = ref()
            if module is None:
                continue
            for key, value in vars(module).items():
                if forms.is_users(key) and (value is None or forms.could_hold(value)):
                    where = f"{name}.{key}" if name else key
                    self._suspects.append((where, ref, key))
