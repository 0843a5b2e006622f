"""Activations recomputed, partly recomputed, or waiting in host memory: the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import TRANSPORTS, line

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.core.state import state_of, unit_of
from shardwise.engine.services import activations as module
from shardwise.engine.services.activations import Activations, OnHost
from shardwise.errors import EngineError


class Block(nn.Module):
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.runs += 1
        return x + self.down(torch.tanh(self.up(x)))


def gradients(transport: str, world: int, rank: int, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 8))
    sw.shard_model(model, mesh=line(world), transport=transport, unit="Block", **options)
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(rank)
        model(torch.randn(64, 8)).square().sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_recomputed(transport: str, rank: int, world: int) -> None:
    expected = gradients(transport, world, rank)
    for kind in (True, "full", "selective"):
        Block.runs = 0
        found = gradients(transport, world, rank, activation_checkpointing=kind)
        assert Block.runs == 8  # two blocks, two steps, forward and again
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    with pytest.raises(ValueError, match="activation_checkpointing='some': expected"):
        gradients(transport, world, rank, activation_checkpointing="some")


@on_ranks(2)
def test_selective_keeps_the_products(rank: int, world: int) -> None:
    """Matrix products do not run again; in full recomputation they do."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.products += func is torch.ops.aten.addmm.default
            return func(*args, **(kwargs or {}))

    counts = {}
    for kind in (True, "selective"):
        model = nn.Sequential(Block(), Block())
        sw.shard_model(
            model, mesh=line(world), unit="Block", transport="c10d", activation_checkpointing=kind
        )
        loss = model(torch.randn(64, 8)).square().sum()
        with Count() as count:
            loss.backward()
        counts[kind] = count.products
    assert counts == {True: 2, "selective": 0}  # the last result is not needed again


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_on_the_host(transport: str, rank: int, world: int, monkeypatch: Any) -> None:
    """On CPU the copies are made all the same, which is what can be tested here."""
    monkeypatch.setattr(module, "OFFLOADED_FROM_BYTES", 1)
    monkeypatch.setattr(module, "copied", [], raising=False)
    expected = gradients(transport, world, rank)
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 8))
    sw.shard_model(model, mesh=line(world), transport=transport, unit="Block")
    for kind in ("keep", "recompute"):
        for block in model[:2]:
            state = state_of(block)
            assert state is not None
            state.around = Activations(kind, offload=True).run
        model.zero_grad()
        torch.manual_seed(rank)
        model(torch.randn(64, 8)).square().sum().backward()
        found = [p.grad.full_tensor() for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@on_ranks(2)
def test_gathered_parameters_are_not_copied(rank: int, world: int) -> None:
    model = sw.fully_shard(nn.Linear(64, 512), mesh=line(world), transport="c10d")
    model.unshard()
    hooks = OnHost(unit_of(model))
    weight, x = model.weight, torch.ones(512, 64)
    assert hooks.pack_hook(weight)[0] is weight
    device, copy = hooks.pack_hook(x)
    assert device == x.device and torch.equal(copy, x) and copy is not x
    packed = hooks.pack_hook(weight)
    model.reshard()
    with pytest.raises(EngineError, match="parameters that were released"):
        hooks.unpack_hook(packed)


@on_ranks(2)
def test_on_cpu_there_is_nothing_to_offload(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="host memory already"):
        sw.shard_model(nn.Sequential(Block()), mesh=line(world), offload_activations=True)
