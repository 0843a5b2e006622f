"""Models and passes as people write them: each trains like its plain copy, for two steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from fsdp2_kit import inputs, mean_gradients, same_parts
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from ranks import on_ranks


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Loop(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class InPlace(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x.tanh_()
        x = x * 2
        x += 1
        return x


class Targets(Layers):
    """Runs some layers without gradients on the way, as self-distillation does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.layers[0](x)
        return super().forward(x) - target


class Nested(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def two(y: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[:2]:
                y = torch.tanh(checkpoint(layer, y, use_reentrant=False))
            return y

        return self.layers[2](checkpoint(two, x, use_reentrant=False))


class Recursive(Layers):
    def forward(self, x: torch.Tensor, n: int = 2) -> torch.Tensor:
        x = torch.tanh(self.layers[n](x))
        return self(x, n - 1) if n else x


def saved_on_cpu(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


CALLS: tuple[tuple[type[nn.Module], Callable[[Any, torch.Tensor], torch.Tensor]], ...] = (
    *((cls, lambda m, x: m(x)) for cls in (Loop, InPlace, Targets, Nested, Recursive)),
    (Layers, saved_on_cpu),
    (Layers, lambda m, x: m(x) + m(x * 2)),
)


@on_ranks(2)
def test_trains_like_the_plain_model(rank: int) -> None:
    for cls, call in CALLS:
        torch.manual_seed(0)
        model: Any = cls()
        plain = copy.deepcopy(model)
        for layer in model.layers:
            sw.fully_shard(layer)
        sw.fully_shard(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for step in range(2):
            for each in (model, plain):
                each.zero_grad()
                call(each, inputs(rank, step)).square().mean().backward()
            mean_gradients(plain)
            for optimizer in optimizers:
                optimizer.step()
        same_parts(model, plain)
