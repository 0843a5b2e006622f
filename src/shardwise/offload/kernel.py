"""The wrapped optimizer's own arithmetic, on tensors that are not its parameters.

Its `step` runs with other tensors in its groups, and with the state that belongs to them: views of
chunks. So whatever torch does with an option, with `fused`, `foreach` or the plain loop, is done
here by the same lines. What that needs is that the step is element-wise: an element's new value
follows from its own parameter, gradient, state and a few numbers for the whole parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.offload.bare_step import BareStep, FirstState, set_gradient
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


class Kernel(BareStep):
    """Runs the step of one optimizer on tensors given.

    Raises:
        ValueError: its step is not element-wise.
    """

    def __init__(self, optimizer: Optimizer, first_state: FirstState | None = None) -> None:
        super().__init__(optimizer, first_state)
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
        after = self.run(self.only(group, [tried]), {})
        found = {k: v for k, v in after[tried].items() if isinstance(v, Tensor) and v.ndim}
        if wrong := [k for k, v in found.items() if v.shape != tried.shape]:
            raise ValueError(
                f"{type(self._optimizer).__name__}: its state {wrong[0]!r} has not one value for "
                "each element of a parameter, so it cannot be kept in pieces"
            )
        return tuple(Slot(k, v.dtype) for k, v in found.items())

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
                state = self.run(self.only(0, params), state)
            ends.append(torch.cat(params))
        return torch.allclose(ends[0], ends[1], rtol=1e-6, atol=1e-7)
