"""The step of an optimizer on tensors given, in place of its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

# Gives a parameter its state before its first step, in place of the optimizer.
FirstState = Callable[[Optimizer, Mapping[str, Any], Tensor], dict[str, Any]]


class BareStep:
    """Runs it without hooks, groups and state of the whole."""

    def __init__(self, optimizer: Optimizer, first_state: FirstState | None = None) -> None:
        self._optimizer, self._first_state = optimizer, first_state

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The options of the parameter groups."""
        return self._optimizer.param_groups

    def as_it_is(self) -> BareStep:
        """Another with the options of now, whatever becomes of the groups: for another thread."""
        optimizer = object.__new__(type(self._optimizer))
        vars(optimizer).update(vars(self._optimizer))
        optimizer.param_groups = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
            for group in self.groups
        ]
        optimizer.state = defaultdict(dict)
        return BareStep(optimizer, self._first_state)

    def run(
        self, params: Sequence[list[Tensor]], state: dict[Tensor, dict[str, Any]]
    ) -> dict[Tensor, dict[str, Any]]:
        """One step of `params`, listed for each group, with their gradients in `.grad`. Gives the
        state after it; where a parameter has none, the optimizer makes it."""
        if self._first_state is not None:
            made = zip(self._optimizer.param_groups, params, strict=True)
            new = [(p, g) for g, listed in made for p in listed if p not in state]
            first = {p: self._first_state(self._optimizer, g, p) for p, g in new}
            state = {**state, **first}
        with self._in_place_of(params, state) as after:
            step = type(self._optimizer).step
            # Without hooks: they belong to the step of the whole.
            bare = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
            bare(self._optimizer)
            return after

    @contextmanager
    def _in_place_of(
        self, params: Sequence[list[Tensor]], state: dict[Tensor, dict[str, Any]]
    ) -> Iterator[dict[Tensor, dict[str, Any]]]:
        groups = self._optimizer.param_groups
        whole = [(group["params"], group.get("foreach")) for group in groups]
        kept = self._optimizer.state
        after: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict, state)
        self._optimizer.state = after
        try:
            for group, given in zip(groups, params, strict=True):
                if not group.get("fused") and "foreach" in group and group["foreach"] is None:
                    # torch decides by the type of the parameters; views are of another one.
                    sharded = any(isinstance(p, DTensor) for p in group["params"])
                    group["foreach"] = False if sharded else None
                group["params"] = given
            yield after
        finally:
            self._optimizer.state = kept
            for group, (held, foreach) in zip(groups, whole, strict=True):
                group["params"] = held
                if "foreach" in group:
                    group["foreach"] = foreach

    def only(self, group: int, params: list[Tensor]) -> list[list[Tensor]]:
        """These, as parameters of one group."""
        return [params if i == group else [] for i in range(len(self.groups))]


def set_gradient(param: Tensor, gradient: Tensor) -> None:
    if param.dtype != gradient.dtype:
        param.grad_dtype = gradient.dtype
    param.grad = gradient
