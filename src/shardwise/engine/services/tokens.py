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
from typing import Any

import torch

from shardwise._torch_compat import at_end_of_backward, graph_task

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
