"""torch FSDP2.

keep         reshard_after_forward=False
hold         set_reshard_after_backward(False) before the last micro-batch: with keep, one gather a
             step
last         set_requires_gradient_sync(False) before the last micro-batch: one reduction a step
hybrid       two replicas, each sharded over half of the ranks (HSDP)
reduce_bf16  gradients are summed in bf16 (reduce_dtype)
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwise.bench.trainers import Setup, Trainer, mesh_for


def make(setup: Setup) -> Trainer:
    options = setup.spec.options
    strategy = "hybrid_shard" if "hybrid" in options else "full_shard"
    settings: dict[str, Any] = {"mesh": mesh_for(strategy, setup.spec.name)}
    if setup.is_bf16 or "reduce_bf16" in options:
        param_dtype = torch.bfloat16 if setup.is_bf16 else None
        reduce_dtype = torch.bfloat16 if "reduce_bf16" in options else torch.float32
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    if "keep" in options:
        settings["reshard_after_forward"] = False
    setup.compile_units()
    for module in setup.units():
        fully_shard(module, **settings)
    model: Any = fully_shard(setup.model, **settings)

    def around(is_last: bool) -> AbstractContextManager[Any]:
        if "last" in options:
            model.set_requires_gradient_sync(is_last)
        if "hold" in options:
            model.set_reshard_after_backward(is_last)
        return contextlib.nullcontext()

    return Trainer(model, setup.adamw(model.parameters()), around)
