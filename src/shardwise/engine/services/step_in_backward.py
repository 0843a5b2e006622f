"""`step_in_backward`: the optimizer steps unit by unit while the backward runs.

    unit L2   gradients reduced -> its parameters step -> its gradients are freed
    unit L1                        gradients reduced -> ...

The gradients of the whole model are never there at once. Exact where a parameter's step depends on
its own gradient alone: all element-wise optimizers, without clipping by the global norm. Idea:
"optimizer step in backward" (PyTorch tutorial, 2023), LOMO (Lv et al. 2023, arXiv 2306.09782).

A unit may be written as soon as nobody gathers it again in this backward. That is so when its
forward ran once, its parameters are not tied to another unit, and all ranks have handed in its
gradients. Other units step at the end of the backward. Should a gradient arrive for a unit that has
stepped already, here or on another rank, it is an error.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from shardwise.engine.core.state import sharded_units
from shardwise.errors import EngineError

if TYPE_CHECKING:
    from shardwise.engine.core.backward import BackwardPass
    from shardwise.engine.core.reduction import Reduction
    from shardwise.engine.core.unit import Unit


_STEPPERS: weakref.WeakKeyDictionary[Unit, Stepper] = weakref.WeakKeyDictionary()


def steps_in_backward(unit: Unit) -> bool:
    """Whether an optimizer steps this unit while the backward runs."""
    return unit in _STEPPERS


class UnitSteps:
    """Listens: which units have stepped in this backward, and which are to step at its end."""

    def __init__(self) -> None:
        self._reducing: dict[Unit, int] = {}
        self._waiting: dict[Unit, None] = {}
        self._stepped: set[Unit] = set()

    def before_backward(self, _backward: BackwardPass) -> None:
        self._reducing.clear()
        self._waiting.clear()
        self._stepped.clear()

    def issued(self, unit: Unit, reductions: list[Reduction]) -> None:
        if unit not in _STEPPERS:
            return
        if unit in self._stepped:
            raise EngineError(
                f"{unit.name}: a gradient arrived after the unit's optimizer step, because the "
                "unit was used more often than its forward ran, here or on another rank; the "
                "weights are not those of this step. Load the last checkpoint, and call "
                "optimizer.step() after the backward instead of step_in_backward()"
            )
        self._reducing[unit] = self._reducing.get(unit, 0) + len(reductions)

    def delivered(self, unit: Unit) -> None:
        if unit not in self._reducing:
            return
        self._reducing[unit] -= 1
        if self._reducing[unit] or not unit.settings.requires_all_reduce:
            return
        if unit.num_uses == 1 and unit.num_modules == 1 and not unit.is_tied:
            self._step(unit)
        else:
            self._waiting[unit] = None

    def ending(self, _backward: BackwardPass) -> None:
        for unit in self._waiting:
            self._step(unit)
        self._waiting.clear()

    def _step(self, unit: Unit) -> None:
        self._stepped.add(unit)
        _STEPPERS[unit].step(unit)


class Stepper:
    """An optimizer that steps a part of its parameters at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, unit: Unit) -> None:
        """Step the parameters of one unit that have a gradient, and free it. An optimizer may have
        `step_later(parameters, event)`: it takes what is complete behind the event, or says False.
        """
        held = [p.sharded for p in unit.params if p.sharded.grad is not None]
        later = getattr(self.optimizer, "step_later", None)
        if later is None or not later(held, unit.streams.record("reduce")):
            unit.streams.land()
            self._step_now(set(map(id, held)))
        for param in unit.params:
            param.sharded.grad = None

    def _step_now(self, own: set[int]) -> None:
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) in own]
        try:
            self.optimizer.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params


def step_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let `optimizer` step each unit of `model` as soon as its gradients are reduced.

    Call it once, after `fully_shard`. Every backward that synchronises gradients is then a step
    (those under `no_sync` are not), and `.grad` is None behind it. `optimizer.step()` may stay in
    the loop: it steps what is left, parameters outside of sharded modules.

    Args:
        model: a model with sharded modules.
        optimizer: holds their parameters; element-wise (SGD, Adam, AdamW, ...).

    Raises:
        ValueError: no module is sharded, a unit has parameters that the optimizer lacks, or the
            optimizer's step needs all ranks together (`OwnedOptimizer`).
    """
    if getattr(optimizer, "needs_all_ranks", False):
        raise ValueError(
            f"{type(optimizer).__name__}: a step needs all ranks at the same point, and in the "
            "backward each comes to a unit in its own time; call optimizer.step() behind it"
        )
    units = sharded_units(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for unit in units:
        for param in unit.params:
            if param.sharded.requires_grad and id(param.sharded) not in held:
                raise ValueError(
                    f"{param.name}: not in the optimizer; build it over all trainable parameters "
                    "of the model, after fully_shard"
                )
    stepper = Stepper(optimizer)
    for unit in units:
        _STEPPERS[unit] = stepper
        unit.gradients.delivers_early = True
        unit.mark.steps_in_backward = True
