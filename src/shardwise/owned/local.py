"""`local_view`: an optimizer that knows nothing of DTensor, over parameters that are DTensors.

    optimizer = shardwise.local_view(Foreign(model.parameters(), lr=1e-3))

It steps this rank's parts, as plain tensors over the same memory. Right for optimizers that treat
each element by itself; one that sees rows, norms or whole tensors sees those of a part (for these
there is `OwnedOptimizer`), so one that does not step a parameter as it steps its halves is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise._torch_compat import local_of
from shardwise.engine.tensor.shard_tensor import ShardTensor, settle, wrap_like, written
from shardwise.offload.bare_step import set_gradient
from shardwise.offload.kept import gradient_of, local_part_of
from shardwise.offload.kernel import Kernel


class LocalOptimizer(Optimizer):
    """See the module docstring. `param_groups` are those of the optimizer that was given; state
    that has one value for each element is a DTensor like its parameter, for checkpoints.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self._kernel = optimizer, Kernel(optimizer)
        shared = {"defaults": optimizer.defaults, "param_groups": optimizer.param_groups}
        super().__setstate__({**shared, "state": optimizer.state})

    def __repr__(self) -> str:
        return f"local_view({self.optimizer!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        every = [p for group in held for p in group]
        settle([p.grad for p in every])
        locals_of = {p: local_part_of(p) for p in every}
        state: dict[Tensor, dict[str, Any]] = {}
        for parameter, local in locals_of.items():
            set_gradient(local, gradient_of(parameter).view(local.shape))
            if parameter in self.state:
                state[local] = {k: _bare(v) for k, v in self.state[parameter].items()}
        try:
            after = self._kernel.run([[locals_of[p] for p in group] for group in held], state)
        finally:
            for parameter, local in locals_of.items():
                local.grad = None
                if isinstance(parameter, ShardTensor):
                    written(parameter)
        for parameter, local in locals_of.items():
            self.state[parameter] = {k: _like(v, parameter) for k, v in after[local].items()}
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What torch's `load_state_dict` ends with; the inner optimizer shares groups and state."""
        super().__setstate__(state)
        self.optimizer.param_groups = self.param_groups
        self.optimizer.state = self.state


def local_view(optimizer: Optimizer) -> Optimizer:
    """An optimizer that steps each rank's parts of sharded parameters as plain tensors.

    Args:
        optimizer: an element-wise one, made from the sharded parameters; it is not to be stepped by
            itself any more.

    Raises:
        ValueError: it steps a parameter otherwise than its parts.
    """
    return LocalOptimizer(optimizer)


def _bare(value: Any) -> Any:
    return local_of(value) if isinstance(value, DTensor) else value


def _like(value: Any, parameter: Tensor) -> Any:
    """A slot with one value for each element lies as its parameter does."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
        return value
    is_like = value.ndim and value.shape == local_of(parameter).shape
    return wrap_like(value, parameter) if is_like else value
