"""Logits that are not computed yet: hidden states, the head, and what the model did to the logits.

    logits = self.lm_head(hidden)           a LazyLogits
    logits = logits / cap; torch.tanh(...)  noted (`_NOTED`): each is element by element
    self.loss_function(logits, labels)      runs head and notes a chunk of rows at a time
    anything else                           computes the logits, and goes on with these

So a model's own code says what happens between its head and its loss, and whatever it does stays
right: at worst the logits are there after all.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.train.loss.chunked import Operation

# Functions of one tensor and numbers that work element by element.
_NOTED: frozenset[Any] = frozenset({
    torch.tanh, torch.mul, torch.div, torch.add, torch.sub, torch.clamp, torch.Tensor.tanh,
    torch.Tensor.mul, torch.Tensor.div, torch.Tensor.clamp,
})  # fmt: skip


class LazyLogits:
    """See the module docstring. `head` is called when somebody needs the logits or the loss."""

    def __init__(
        self, head: nn.Module, hidden: Tensor, operations: tuple[Operation, ...] = ()
    ) -> None:
        self._head, self._hidden, self._operations = head, hidden, operations

    def loss(self, targets: Tensor, chosen: Tensor) -> Tensor:
        """Sum of the cross-entropies of the `chosen` rows; targets and chosen: [...] like
        hidden's. One call of the head."""
        rows = self._hidden.reshape(-1, self._hidden.shape[-1])[chosen.reshape(-1)]
        wanted = targets.reshape(-1)[chosen.reshape(-1)]
        return self._head(rows, targets=wanted, operations=self._operations)

    def computed(self) -> Tensor:
        """The logits. One call of the head."""
        logits = self._head(self._hidden)
        for operation in self._operations:
            logits = operation(logits)
        return logits

    def _with(self, operation: Operation) -> LazyLogits:
        return LazyLogits(self._head, self._hidden, (*self._operations, operation))

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    # -- what is noted ---------------------------------------------------------------------------
    def float(self) -> LazyLogits:
        return self._with(torch.Tensor.float)

    def contiguous(self) -> LazyLogits:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("dtype")
        if isinstance(first, torch.dtype) and first.is_floating_point and len(args) < 2:
            return self._with(functools.partial(torch.Tensor.to, dtype=first))
        return self.computed().to(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first, *rest = args or (None,)
        plain = all(_is_number(value) for value in (*rest, *kwargs.values()))
        if isinstance(first, LazyLogits) and func in _NOTED and plain:
            return first._with(lambda x: func(x, *rest, **kwargs))
        given = [a.computed() if isinstance(a, LazyLogits) else a for a in args]
        named = {k: v.computed() if isinstance(v, LazyLogits) else v for k, v in kwargs.items()}
        return func(*given, **named)

    # -- what computes the logits ----------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copy, pickle and the like
            raise AttributeError(name)
        return getattr(self.computed(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.computed()[index]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _operator(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    """An operator with a number is noted; with anything else the logits are computed."""

    def apply(self: LazyLogits, other: Any) -> Any:
        def on(logits: Tensor) -> Tensor:
            return function(other, logits) if swapped else function(logits, other)

        return self._with(on) if _is_number(other) else on(self.computed())

    return apply


for _name in ("add", "sub", "mul", "truediv"):
    setattr(LazyLogits, f"__{_name}__", _operator(getattr(operator, _name)))
    setattr(LazyLogits, f"__r{_name}__", _operator(getattr(operator, _name), swapped=True))
