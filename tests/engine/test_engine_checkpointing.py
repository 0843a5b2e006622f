"""Activation checkpointing, ours per unit and torch's inside and around units: same gradients.

A recomputed forward runs inside the backward: its unit is gathered once for both, so a step gathers
every unit twice, as without checkpointing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import (
    STRATEGIES,
    Blocks,
    Mlp,
    Setting,
    batch,
    expected,
    is_exact,
    loss_of,
    make,
    same_grads,
    settings,
)
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from ranks import on_ranks

EVERY = settings(*STRATEGIES, reshard=(True, False))


class CheckpointedMlp(Mlp):
    """torch's checkpoint around every unit (or a pair of them), called by the model."""

    reentrant = False
    pairs = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()  # the reentrant kind needs one
        if self.pairs:
            x = checkpoint(self.several, x, 0, 2, use_reentrant=self.reentrant)
            x = checkpoint(self.several, x, 2, 3, use_reentrant=self.reentrant)
        else:
            for i in range(3):
                x = checkpoint(self.several, x, i, i + 1, use_reentrant=self.reentrant)
        return self.norm(x)

    def several(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        for layer in self.layers[start:stop]:
            x = torch.tanh(layer(x))
        return x


class Reentrant(CheckpointedMlp):
    reentrant = True


class Pairs(CheckpointedMlp):
    pairs = True


class ReentrantPairs(CheckpointedMlp):
    pairs = reentrant = True


class Inside(nn.Module):
    """A unit that checkpoints a part of itself."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return x + self.b(hidden)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x))


class InsideOut(nn.Module):
    features = 8

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Inside(reentrant=reentrant) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def backward(model: Any, rank: int) -> Counter[str]:
    """One step; how often each unit was gathered."""
    with sw.record_events(model) as log:
        loss_of(model(batch(model, 0, rank))).backward()
    return Counter(e.unit for e in log.codes("AG"))


@pytest.mark.parametrize("setting", settings(*STRATEGIES), ids=str)
@on_ranks(2)
def test_per_unit(setting: Setting, rank: int, world: int) -> None:
    for cls in (Mlp, Blocks):
        model = make(cls)
        units = [type(model.layers[0]).__name__]
        sw.shard_model(model, unit=units, activation_checkpointing=True, **setting.options(world))
        gathers = backward(model, rank)
        same_grads(model, expected(cls, world, "sgd", 1)[0][0], f"{setting} {cls.__name__}")
        wanted = {"full_shard": {2}, "no_shard": {1}}.get(setting.strategy, {1})
        assert set(gathers.values()) == wanted, f"{setting}: {gathers}"


@pytest.mark.parametrize("cls", [CheckpointedMlp, Reentrant, Pairs, ReentrantPairs])
@on_ranks(2, 3)
def test_around_units(cls: Any, rank: int, world: int) -> None:
    for setting in EVERY:
        model = setting.shard(make(cls), world)
        exact = is_exact(setting, world)
        grads = expected(Mlp, world, "sgd", 1)[0][0]
        for _ in range(2):
            gathers = backward(model, rank)
            same_grads(model, grads, f"{setting} {cls.__name__}", exact=exact)
            model.zero_grad()
        if setting.strategy == "full_shard":
            assert all(gathers[f"layers.{i}"] == 2 for i in range(3)), f"{setting}: {gathers}"


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_inside_units(reentrant: bool, rank: int, world: int) -> None:
    plain = make(lambda: InsideOut(reentrant=reentrant))
    for setting in EVERY:
        model = setting.shard(make(lambda: InsideOut(reentrant=reentrant)), world)
        for step in range(2):
            gathers = backward(model, rank)
            want: dict[str, torch.Tensor] = {}
            for r in range(world):
                plain.zero_grad()
                loss_of(plain(batch(plain, 0, r))).backward()
                for n, p in plain.named_parameters():
                    want[n] = p.grad if r == 0 else want[n] + p.grad
            same_grads(model, {n: g / world for n, g in want.items()}, f"{setting} step {step}")
            model.zero_grad()
        if setting.strategy == "full_shard":
            assert all(gathers[f"layers.{i}"] == 2 for i in range(3)), f"{setting}: {gathers}"


@on_ranks(2)
def test_recomputation_saves_activations(rank: int, world: int) -> None:
    """What a unit keeps for its backward is its input alone."""

    def saved(**options: Any) -> int:
        model = make(Blocks)
        sw.shard_model(model, unit=["Block"], **options)
        sizes = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            sizes.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(batch(model, 0, rank))
        return sum(sizes)

    assert saved(activation_checkpointing=True) < 0.5 * saved()


class Tied(nn.Module):
    """Two units that share a weight; the one that borrows it is run again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.layers[0].weight = self.layers[1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layers[0], x, use_reentrant=False)
        return self.layers[1](torch.tanh(x))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@on_ranks(2)
def test_gradients_of_tied_units_outlive_an_evaluation(
    rank: int, world: int, transport: str, order: tuple[int, int]
) -> None:
    """Torch ends a recomputation by an exception; the unit that lends the weight rests then."""
    model: Any = make(Tied)
    for i in order:
        sw.fully_shard(model.layers[i], transport=transport)
    sw.fully_shard(model, transport=transport)
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in grads)
    with torch.no_grad():
        model(x)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert isinstance(p, sw.ShardTensor) and p.grad is grad
