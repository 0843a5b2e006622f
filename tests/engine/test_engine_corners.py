"""Corners found by running code that nobody wrote for this engine. Each went wrong before."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn as nn
from engine_kit import Mlp, batch, expected, loss_of, make, same_grads, units_of

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.state import unit_of


def sharded(model: Any, **options: Any) -> Any:
    for unit in units_of(model):
        sw.fully_shard(unit, **options)
    return sw.fully_shard(model, **options)


def averaged(model: nn.Module, group_size: int) -> dict[str, torch.Tensor | None]:
    """Gradients of a plain model, averaged over the ranks."""
    for p in model.parameters():
        if p.grad is not None:
            torch.distributed.all_reduce(p.grad)
            p.grad /= group_size
    return {n: p.grad for n, p in model.named_parameters()}


class TrainsInForward(Mlp):
    """Calls backward inside its own forward, as inner loops and auxiliary losses do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(super().forward(x))
        loss.backward()
        return loss.detach()


@on_ranks(2)
def test_backward_inside_a_forward(rank: int, world: int) -> None:
    """The phase of the forward was never left: on shared memory, all later passes of all models on
    that mesh went without fences and read weights from before their peers' optimizer steps.
    """
    model = make(TrainsInForward)
    plain = copy.deepcopy(model)
    sharded(model)
    for _ in range(2):
        model(batch(model, 0, rank))
        plain(batch(model, 0, rank))
    same_grads(model, averaged(plain, world))
    assert all(wire.depth == 0 for wire in unit_of(model).wires)
    assert model._shardwise_state.unit.context.depth == 0
