"""AdamW with decay on matrices only, and the learning rate of every step."""

from __future__ import annotations

import math

import torch
from torch import nn

from shardwise.train.config import Config, OptimConfig


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, fused: bool = True
) -> torch.optim.Optimizer:
    """Norm scales and biases (fewer than two dims) do not decay: their size carries meaning.

    Fused on CPU, the last elements of a parameter round differently, so where it is cut matters.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    # Fused: the plain loop takes several times as long on CPU; see benchmarks/README.md.
    how = {"fused": True} if fused else {"foreach": True}
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, **how)


def learning_rate(config: Config, step: int) -> float:
    """Of step 1 .. train.steps: linear warm-up to `lr`, then the schedule."""
    optim, steps = config.optim, config.train.steps
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    progress = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return optim.lr * (optim.final_lr_ratio + (1 - optim.final_lr_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
