"""Megatron-FSDP's fully_shard (ZeRO-3), as far as it runs on CPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.bench.trainers import Setup, Trainer


def make(setup: Setup) -> Trainer:
    fully_shard: Any = import_module("megatron_fsdp").fully_shard

    classes: list[Any] = list({type(module) for module in setup.units()})
    model, optimizer = fully_shard(
        module=setup.model,
        optimizer=setup.adamw(setup.model.parameters()),
        fsdp_unit_modules=classes,
        zero_dp_strategy=3,
        device_mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",)),
        dp_shard_dim="fsdp",
    )
    return Trainer(model, optimizer)
