"""Several optimizers as one: for whoever steps, zeroes and schedules."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer


class Together(Optimizer):
    """`optimizers` have the parameters among them; groups are theirs. Checkpoints take each for
    itself.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        groups = [group for one in self.optimizers for group in one.param_groups]
        state: Any = ChainMap(*(one.state for one in self.optimizers))
        super().__setstate__({"defaults": {}, "param_groups": groups, "state": state})

    def __repr__(self) -> str:
        return f"Together{self.optimizers!r}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for one in self.optimizers:
            one.step()
        return loss
