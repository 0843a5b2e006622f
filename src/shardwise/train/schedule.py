"""The learning rate of every step: a linear warm-up, then a schedule.

    constant    lr
    cosine      down a cosine to final_lr_ratio * lr
    linear      down a line to the same
    wsd         lr, and down a line to the same in the last decay_share of the steps

Source of the last: MiniCPM's warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395): a run may
be prolonged from any step before the decay.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardwise.train.config import Config

if TYPE_CHECKING:
    import torch


def learning_rate(config: Config, step: int) -> float:
    """Of step 1 .. train.steps."""
    optim, steps = config.optim, config.train.steps
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    return optim.lr * (
        optim.final_lr_ratio + (1 - optim.final_lr_ratio) * _share_left(config, step, steps)
    )


def _share_left(config: Config, step: int, steps: int) -> float:
    """Of the way from lr down to its end: 1 at the beginning, 0 at the last step."""
    optim = config.optim
    if optim.schedule == "constant":
        return 1.0
    first = optim.warmup_steps
    if optim.schedule == "wsd":
        first = max(first, steps - round(optim.decay_share * steps))
    progress = min(1.0, max(0, step - first) / max(1, steps - first))
    if optim.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
