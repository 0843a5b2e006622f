"""torch FullyShardedDataParallel (FSDP1).

keep   ShardingStrategy.SHARD_GRAD_OP: parameters stay gathered between forward and backward
last   no_sync() before the last micro-batch
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from shardwise.bench.trainers import Setup, Trainer


def make(setup: Setup) -> Trainer:
    units = {id(module) for module in setup.units()}
    strategy = ShardingStrategy.FULL_SHARD
    if "keep" in setup.spec.options:
        strategy = ShardingStrategy.SHARD_GRAD_OP
    precision = None
    if setup.is_bf16:
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FullyShardedDataParallel(
        setup.model,
        sharding_strategy=strategy,
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=lambda m: id(m) in units),
        mixed_precision=precision,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )

    def around(is_last: bool) -> AbstractContextManager[Any]:
        if "last" in setup.spec.options and not is_last:
            return model.no_sync()
        return contextlib.nullcontext()

    return Trainer(model, setup.adamw(model.parameters()), around)
