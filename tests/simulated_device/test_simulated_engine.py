"""The engine on the simulated device."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
import simulated_device
from engine.engine_kit import Mlp, make
from shardwise.comm.kept import kept
from simulated_device.worlds import run_on_devices

pytestmark = pytest.mark.timeout(600)


def train(rank: int, world: int) -> None:
    weights = {}
    for device in ("cpu", "sim"):
        kept("transports").clear()
        simulated_device.slow_down(300, seed=rank)
        model = make(Mlp)
        mesh = init_device_mesh(device, (world,))
        for layer in model.layers:
            sw.fully_shard(layer, mesh=mesh, transport="c10d")
        sw.fully_shard(model, mesh=mesh, transport="c10d")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights[device] = [p.full_tensor().cpu() for p in model.parameters()]
    for on_cpu, on_device in zip(weights["cpu"], weights["sim"], strict=True):
        assert torch.equal(on_cpu, on_device)
    assert simulated_device.report().races == []


def test_full_shard() -> None:
    run_on_devices(2, train)
