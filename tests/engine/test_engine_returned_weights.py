"""Modules that return their parameters, or views of them: what they return stays readable after the
unit was released, with and without gradients, and takes its gradient to the weight.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import STRATEGIES, TRANSPORTS, Setting, make, same_grads

from ranks import on_ranks


class Returning(nn.Module):
    features = 8

    def __init__(self, kind: str = "weight") -> None:
        super().__init__()
        self.layers = nn.ModuleList([Codebook(kind), Codebook(kind)])

    def forward(self, x: torch.Tensor) -> Any:
        kept = []
        for layer in self.layers:
            x, weight = layer(x)
            kept.append(weight)
        return x, kept


class Codebook(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        kept = {"weight": self.weight, "rows": self.weight[2:5], "turned": self.weight.t()}
        return torch.tanh(x @ self.weight), kept[self.kind]


def outputs(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return model(torch.linspace(-1, 1, 16).view(2, 8))


@pytest.mark.parametrize("kind", ["weight", "rows", "turned"])
@on_ranks(2)
def test_what_is_returned_can_be_used(kind: str, rank: int, world: int) -> None:
    plain = make(lambda: Returning(kind))
    x, kept = outputs(plain)
    (x.sum() + sum((k * k).sum() for k in kept)).backward()
    for strategy in STRATEGIES:
        for transport in TRANSPORTS:
            model = Setting(strategy, transport).shard(copy.deepcopy(plain), world)
            with torch.no_grad():
                out = outputs(model)
                assert all(a.equal(b) for a, b in zip(out[1], kept, strict=True)), strategy
            model.zero_grad()
            found, held = outputs(model)
            assert all(a.equal(b) for a, b in zip(held, kept, strict=True)), strategy
            (found.sum() + sum((k * k).sum() for k in held)).backward()
            assert all(a.equal(b) for a, b in zip(held, kept, strict=True)), strategy
            same_grads(model, {n: p.grad for n, p in plain.named_parameters()}, strategy)


class Lone(nn.Module):
    """Returns nothing but its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self) -> torch.Tensor:
        return self.weight


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Lone()])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layers[0]()
        return ((x @ weight) * self.scale) @ weight.t()


@on_ranks(2)
def test_a_module_that_is_its_weight(rank: int, world: int) -> None:
    """Its gradient comes by the copy alone; no hook stays on the weight from step to step."""
    plain = make(Tied)
    x = torch.linspace(-1, 1, 16).view(2, 8)
    for transport in TRANSPORTS:
        model = Setting("full_shard", transport).shard(copy.deepcopy(plain), world)
        for _ in range(3):
            for m in (plain, model):
                m.zero_grad()
                m(x).square().sum().backward()
            same_grads(model, {n: p.grad for n, p in plain.named_parameters()}, transport)
        (param,) = model.layers[0]._shardwise_state.unit.params
        assert not param.full._backward_hooks
