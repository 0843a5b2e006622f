"""Bytes of what operators have made and somebody still holds, by storage, at every operator.

    with Live(vocab_size=49152) as live:
        loss = model(tokens)
    live.now, live.peak           Held(activations, logits)

A dispatch mode sees each operator's results. A storage that none of its inputs has is new; a weak
reference tells when the last tensor over it goes. So fake tensors, which have sizes and no memory,
count like real ones: what a step will need is known before it runs. Memory that an operator takes
and gives back inside is not seen, nor are storages that somebody else made (`set_`), such as those
that the engine gathers into. Logits are what has the vocabulary for its last dim: scores, their
log-softmax, their gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import DispatchMode
from shardwise.engine.tensor.trees import tensors_in

_ADOPTS = torch.ops.aten.set_


class Held(NamedTuple):
    """Bytes at one time."""

    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.logits


class Live(DispatchMode):
    """See the module docstring. `peak` is the largest sum since `take_peak`."""

    def __init__(self, vocab_size: int | None = None) -> None:
        super().__init__()
        self.vocab_size = vocab_size  # None: what is made now has nothing to do with scores
        self._known: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = Held()

    def pass_over(self, tensors: Iterable[Tensor]) -> None:
        """They are counted elsewhere: parameters and buffers."""
        for tensor in tensors:
            self._know(tensor.untyped_storage(), Held())

    def take_peak(self) -> Held:
        """The most since the last time; begins anew."""
        peak, self.peak = self.peak, self.now
        return peak

    def see(self, tensor: Tensor) -> None:
        """A tensor that no operator made in here."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._know(storage, self._size(tensor, storage))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on plain tensors come here one by one
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage._cdata in self._known:
                continue
            inputs = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
            is_old = storage._cdata in inputs or func.overloadpacket is _ADOPTS
            self._know(storage, Held() if is_old else self.size_of_new(tensor, storage))
        return out

    def size_of_new(self, tensor: Tensor, storage: torch.UntypedStorage) -> Held:
        """What a storage counts as that an operator has made."""
        return self._size(tensor, storage)

    def _size(self, tensor: Tensor, storage: torch.UntypedStorage) -> Held:
        size = storage.nbytes()
        is_logits = tensor.ndim > 1 and tensor.shape[-1] == self.vocab_size
        return Held(0, size) if is_logits else Held(size, 0)

    def _know(self, storage: torch.UntypedStorage, size: Held) -> None:
        key = storage._cdata
        self._known[key] = weakref.ref(storage, partial(self._gone, key, size))
        self.now = Held(self.now.activations + size.activations, self.now.logits + size.logits)
        if self.now.total > self.peak.total:
            self.peak = self.now

    def _gone(self, key: int, size: Held, ref: Any) -> None:
        if self._known.get(key) is ref:
            del self._known[key]
            self.now = Held(self.now.activations - size.activations, self.now.logits - size.logits)
