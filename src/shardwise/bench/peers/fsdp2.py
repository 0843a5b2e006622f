"""torch FSDP2.

keep   reshard_after_forward=False
hold   set_reshard_after_backward(False) before the last micro-batch: with keep, one gather a step
last   set_requires_gradient_sync(False) before the last micro-batch: one reduction a step
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwise.bench.trainers import Setup, Trainer


def make(setup: Setup) -> Trainer:
    settings: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if setup.is_bf16:
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if "keep" in setup.spec.options:
        settings["reshard_after_forward"] = False
    setup.compile_units()
    for module in setup.units():
        fully_shard(module, **settings)
    model: Any = fully_shard(setup.model, **settings)
    options = setup.spec.options

    def around(is_last: bool) -> AbstractContextManager[Any]:
        if "last" in options:
            model.set_requires_gradient_sync(is_last)
        if "hold" in options:
            model.set_reshard_after_backward(is_last)
        return contextlib.nullcontext()

    return Trainer(model, setup.adamw(model.parameters()), around)
