"""`global_mean`: the exact mean over all tokens of all ranks and micro-batches.

Averaging per-rank means is wrong when ranks hold unequal numbers of tokens. Here gradients stay
those of the sum; the backward that reduces them divides by the count over all ranks and over all
micro-batches since the last reduction:

    micro-batch 1 (no_sync)  sum of losses, count c1        gradients add up, unscaled
    micro-batch 2 (sync)     sum of losses, count c2        all ranks: total = sum of (c1 + c2)
                                                            gradient = sum / total

Source of the problem and of the remedy: Hugging Face's "fixing gradient accumulation" (2024) and
torchtitan's scaling by global valid tokens; both leave the arithmetic to the user.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch_compat import at_end_of_backward, graph_task
from shardwise.comm.exchange import groups_of, sum_over
from shardwise.errors import EngineError

if TYPE_CHECKING:
    from shardwise.engine.core.backward import BackwardPass
    from shardwise.engine.core.context import Context
    from shardwise.engine.core.unit import Unit

_COUNTS: dict[int, float] = {}  # graph task -> tokens behind its loss


def _forget(task: int) -> None:
    _COUNTS.pop(task, None)


class _Counted(torch.autograd.Function):
    """Identity that tells the engine, at the start of the backward, how many tokens are in it."""

    @staticmethod
    def forward(ctx: Any, loss_sum: torch.Tensor, count: float) -> torch.Tensor:
        ctx.count = count
        return loss_sum / max(count, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        task = graph_task()
        assert task is not None
        if task not in _COUNTS:
            at_end_of_backward(functools.partial(_forget, task))
        _COUNTS[task] = _COUNTS.get(task, 0.0) + ctx.count
        return grads[0], None


def global_mean(loss_sum: torch.Tensor, count: int | float | torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is that of the mean over the tokens of all ranks and micro-batches.

    Args:
        loss_sum: sum (not mean) of the losses of this rank's tokens: a scalar.
        count: number of tokens in it; may differ between ranks and micro-batches, and be zero.

    Returns:
        A scalar whose value is this rank's mean, for logging. Call `backward()` on it, without
        further scaling. Micro-batches with and without it must not be mixed before a reduction.

    Raises:
        ValueError: `loss_sum` is no scalar, or `count` is negative.
    """
    if loss_sum.numel() != 1:
        raise ValueError(f"loss_sum: expected a scalar, found shape {tuple(loss_sum.shape)}")
    number = float(count)
    if number < 0:
        raise ValueError(f"count: expected tokens, found {number}")
    return _Counted.apply(loss_sum, number)


def count_of_backward() -> float | None:
    """Tokens behind the loss of the backward that runs now; None when it does not count."""
    task = graph_task()
    return _COUNTS.get(task) if task is not None else None


class Tokens:
    """Listens: adds up the tokens behind the losses of an accumulation, and lets the backward that
    reduces divide by those of all ranks.
    """

    def __init__(self) -> None:
        self._num_tokens: float | None = None  # since the last reduction; None: losses are means
        self._is_accumulating = False  # a backward without sync has left partial gradients

    def before_backward(self, backward: BackwardPass) -> None:
        """Add the tokens of this backward; when it reduces, agree on the total."""
        if graph_task() is None:
            return  # partial gradients are reduced without a backward, see `weighing`
        context = backward.context
        count, units = count_of_backward(), context.units
        if self._is_accumulating and (count is None) != (self._num_tokens is None):
            raise EngineError(
                "micro-batches with and without global_mean() are mixed in one accumulation; use "
                "it for all micro-batches of a step, or for none"
            )
        if count is not None:
            _check_weights(units)
            if not all(unit.gradients.route.counts for unit in units):
                count = 0.0
        self._num_tokens = None if count is None else (self._num_tokens or 0.0) + count
        self._is_accumulating = True
        context.weight.is_counted = count is not None
        if any(unit.settings.requires_sync for unit in units):
            self.weighing(context)

    def weighing(self, context: Context) -> None:
        """The total over all ranks since the last reduction: a small all-reduce."""
        if self._num_tokens is None:
            return
        mesh = context.units[0].mesh
        total = torch.tensor([self._num_tokens], dtype=torch.float64, device=mesh.device)
        groups = groups_of(mesh.shard, mesh.replicate)
        sum_over(total, groups, "all_reduce of the number of tokens")
        context.weight.count = max(total.item(), 1.0)

    def after_backward(self, context: Context) -> None:
        """A reduction starts the count anew."""
        if any(unit.settings.requires_sync for unit in context.units):
            self.failed(context)
        context.weight.count = None

    def failed(self, context: Context) -> None:
        self._num_tokens, self._is_accumulating = None, False
        context.weight.count, context.weight.is_counted = None, False


def _check_weights(units: list[Unit]) -> None:
    for unit in units:
        if unit.gradients.route.refuses_counts:
            raise EngineError(unit.gradients.route.refuses_counts)
        if (factor := unit.settings.divide_by) is not None:
            raise EngineError(
                f"{unit.name}: global_mean() divides its gradients by the number of tokens, and "
                f"set_gradient_divide_factor({factor:g}) by another number; use one of the two"
            )
