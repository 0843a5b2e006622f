"""FairScale's FullyShardedDataParallel, a unit for each of ours, as far as it runs on CPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from shardwise.bench.trainers import Setup, Trainer


def make(setup: Setup) -> Trainer:
    FullyShardedDataParallel = import_module("fairscale.nn").FullyShardedDataParallel

    settings: dict[str, Any] = {"compute_device": torch.device("cpu")}
    if setup.is_bf16:
        settings |= {"mixed_precision": True, "compute_dtype": torch.bfloat16}
        settings |= {"fp32_reduce_scatter": True}
    units = {id(module) for module in setup.units()}

    def wrap(module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            wrap(child)
            if id(child) in units:
                setattr(module, name, FullyShardedDataParallel(child, **settings))

    wrap(setup.model)
    model = FullyShardedDataParallel(setup.model, **settings)
    return Trainer(model, setup.adamw(model.parameters()))
