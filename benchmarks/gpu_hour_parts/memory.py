"""Peaks of the allocator on the device, and beside them what `allocator.py`'s model says.

Two stages: `predicted` runs the model of the allocator in one process, for as many ranks as there
are devices; `memory` trains the same models on the devices, and takes the allocator's own numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import allocator
from gpu_hour_parts import engines
from gpu_hour_parts.settings import Context, Row, Settings

MODELS = ("12 blocks", "50M", "185M")
ENGINES = ("shardwise", "fsdp2")
NUM_STEPS = 5


def items(settings: Settings) -> list[str]:
    if settings.is_dry:
        return [f"12 blocks/fp32/{engine}" for engine in ENGINES]
    return [f"{m}/{p}/{e}" for m in MODELS for p in ("fp32", "bf16") for e in ENGINES]


def predict(item: str, context: Context) -> Row:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    name, precision, engine = item.split("/")
    if not dist.is_initialized():
        world = context.settings.world
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    mesh = init_device_mesh("cpu", (context.settings.world,))
    found = allocator.measure(engine, name, mesh, precision, 3 if context.is_dry else NUM_STEPS)
    at_sync = found["at_sync"]
    return {
        "allocated_peak_bytes": at_sync["allocated_peak_bytes"],
        "reserved_peak_bytes": at_sync["reserved_bytes"],
        "reserved_by_stream": at_sync["reserved_by_stream"],
    }


def run(item: str, context: Context) -> Row:
    name, precision, engine = item.split("/")
    build, loss_of = allocator.MODELS[name]
    model: Any
    model, units = build()
    model.to(context.device.place)  # by torch, since FSDP2's own way is refused by new devices
    model = engines.shard(engine, model, units, context, precision)
    optimizer = engines.adamw(model.parameters(), context)
    place, device = context.device.place, context.device

    def loss() -> torch.Tensor:
        with torch.device(place):
            return loss_of(model)

    device.start_peaks()
    reserved = []
    path = context.folder / f"memory_{name}_{precision}_{engine}.pickle".replace(" ", "_")
    with device.memory_history(path if context.rank == 0 else None):
        for _ in range(NUM_STEPS):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            device.synchronize()
            reserved.append(device.reserved_bytes())
    return {
        **(device.peaks() or {}),
        "reserved_after_step": reserved,
        "reserved_by_stream": device.reserved_by_stream(),
    }
