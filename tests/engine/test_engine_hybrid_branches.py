"""Replicas that run different units finish their reductions in different orders, and none waits for
another's last: all first stages are over before any second one is waited for."""

from __future__ import annotations

import torch
import torch.nn as nn
from engine_kit import full, grid, make

import shardwise as sw
from ranks import on_ranks


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.head(self.layers[which](x)).square().mean()


@on_ranks(4)
def test_replicas_that_run_different_units(rank: int, world: int) -> None:
    model, plain = make(Experts), make(Experts)
    for unit in [*model.layers, model]:
        sw.fully_shard(unit, mesh=grid(2, 2), transport="shared_memory")
    model(torch.ones(3, 5) * rank, rank // 2).backward()
    for r in range(world):
        (plain(torch.ones(3, 5) * r, r // 2) / world).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad, msg=name)
