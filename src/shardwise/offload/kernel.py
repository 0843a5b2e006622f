"""The wrapped optimizer's own arithmetic, on tensors that are not its parameters.

Its `step` runs with other tensors in its groups, and with the state that belongs to them: views of
chunks. So whatever torch does with an option, with `fused`, `foreach` or the plain loop, is done
here by the same lines. What that needs is that the step is element-wise: an element's new value
follows from its own parameter, gradient, state and a few numbers for the whole parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.offload.chunks import Slot

ELEMENTWISE = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
)  # fmt: skip
REFUSED = {
    "Adafactor": "keeps means over whole rows and columns",
    "LBFGS": "computes the loss several times a step and keeps a history of whole gradients",
    "Muon": "needs each matrix whole",
    "SparseAdam": "expects sparse gradients",
}
_TRIED = 2048  # elements of the parameter by which an unknown optimizer is tried
# Gives a parameter its state before its first step, in place of the optimizer.
FirstState = Callable[[Optimizer, Mapping[str, Any], Tensor], dict[str, Any]]


class Kernel:
    """Runs the step of one optimizer on tensors given.

    Raises:
        ValueError: its step is not element-wise.
    """

    def __init__(self, optimizer: Optimizer, first_state: FirstState | None = None) -> None:
        self._optimizer, self._first_state = optimizer, first_state
        name = type(optimizer).__name__
        known = type(optimizer) is getattr(torch.optim, name, None)
        if known and name in REFUSED:
            raise ValueError(
                f"{name} {REFUSED[name]}, so its state cannot be kept in pieces; use one of "
                f"{', '.join(ELEMENTWISE)}, or keep the state on the device"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ValueError(f"{name}: differentiable=True keeps graphs of the state; leave it out")
        if not (known and name in ELEMENTWISE) and not self._is_elementwise():
            raise ValueError(
                f"{name} steps a parameter otherwise than its parts, so its state cannot be kept "
                "in pieces; keep it on the device"
            )

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The options of the parameter groups."""
        return self._optimizer.param_groups

    def as_it_is(self) -> Kernel:
        """Another with the options of now, whatever becomes of the groups: for another thread."""
        optimizer = object.__new__(type(self._optimizer))
        vars(optimizer).update(vars(self._optimizer))
        optimizer.param_groups = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
            for group in self.groups
        ]
        optimizer.state = defaultdict(dict)
        made = object.__new__(Kernel)
        made._optimizer, made._first_state = optimizer, self._first_state
        return made

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

    def slots(self, group: int, like: Tensor, gradient_dtype: torch.dtype) -> tuple[Slot, ...]:
        """What the optimizer keeps for each element of a parameter like this, with the options
        that its group has now: asked of a step of two elements."""
        how = self._optimizer.param_groups[group]
        if how.get("fused") and how.get("momentum") and like.is_cpu and like.itemsize < 4:
            raise ValueError(
                "SGD with momentum and fused=True: torch's kernel for parameters in 16 bits on CPU "
                "reads outside of its momentum; use foreach=True"
            )
        tried = torch.ones(2, dtype=like.dtype, device=like.device)
        set_gradient(tried, torch.ones(2, dtype=gradient_dtype, device=like.device))
        after = self.run(self._only(group, [tried]), {})
        found = {k: v for k, v in after[tried].items() if isinstance(v, Tensor) and v.ndim}
        if wrong := [k for k, v in found.items() if v.shape != tried.shape]:
            raise ValueError(
                f"{type(self._optimizer).__name__}: its state {wrong[0]!r} has not one value for "
                "each element of a parameter, so it cannot be kept in pieces"
            )
        return tuple(Slot(k, v.dtype) for k, v in found.items())

    def _only(self, group: int, params: list[Tensor]) -> list[list[Tensor]]:
        groups = self._optimizer.param_groups
        return [params if i == group else [] for i in range(len(groups))]

    def _is_elementwise(self) -> bool:
        """Two steps of a parameter and of its halves come out alike."""
        ends = []
        for parts in (1, 2):
            generator = torch.Generator().manual_seed(0)
            made = torch.randn(3, _TRIED, generator=generator)
            params = list(made[0].clone().chunk(parts))
            state: dict[Tensor, dict[str, Any]] = {}
            for gradient in made[1:]:
                for param, part in zip(params, gradient.chunk(parts), strict=True):
                    param.grad = part.clone()
                state = self.run(self._only(0, params), state)
            ends.append(torch.cat(params))
        return torch.allclose(ends[0], ends[1], rtol=1e-6, atol=1e-7)


def set_gradient(param: Tensor, gradient: Tensor) -> None:
    if param.dtype != gradient.dtype:
        param.grad_dtype = gradient.dtype
    param.grad = gradient
