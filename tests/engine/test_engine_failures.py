"""An exception in forward or backward, on all ranks: the next step is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_kit import (
    STRATEGIES,
    Mlp,
    Setting,
    batch,
    expected,
    loss_of,
    make,
    same_grads,
    same_weights,
    settings,
)

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.services.inspect import gathered_bytes

EVERY = settings(*STRATEGIES, reshard=(False, None))


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("boom in backward")


class Fragile(Mlp):
    """Fails behind its second layer when told to."""

    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1 and self.fails == "forward":
                raise ArithmeticError("boom in forward")
            if i == 1 and self.fails == "backward":
                x = Boom.apply(x)
        return self.norm(x)


def fail(model: Any, where: str, rank: int) -> None:
    model.fails = where
    with pytest.raises(ArithmeticError, match=f"boom in {where}"):
        loss_of(model(batch(model, 9, rank))).backward()
    model.fails = ""


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(2)
def test_the_next_steps_are_right(setting: Setting, where: str, rank: int, world: int) -> None:
    model = setting.shard(make(Fragile), world)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for step, (grads, weights) in enumerate(expected(Mlp, world, "sgd", 3)):
        for _ in range(2):
            fail(model, where, rank)
        opt.zero_grad()
        loss_of(model(batch(model, step, rank))).backward()
        same_grads(model, grads, f"{setting} step {step}")
        opt.step()
        opt.zero_grad()
        same_weights(model, weights, f"{setting} step {step}")


@on_ranks(2)
def test_nothing_stays_gathered(rank: int, world: int) -> None:
    for setting in settings("full_shard", reshard=(True, False, None)):
        model = setting.shard(make(Fragile), world)
        fail(model, "forward", rank)
        assert gathered_bytes(model) == 0, str(setting)
        fail(model, "backward", rank)
        model.reset_iter_state()
        assert gathered_bytes(model) == 0, str(setting)


@on_ranks(2)
def test_while_accumulating(rank: int, world: int) -> None:
    """What earlier micro-batches collected is kept, what the failed one collected is not."""
    for setting in EVERY:
        model = setting.shard(make(Fragile), world)
        with sw.no_sync(model):
            fail(model, "forward", rank)
        model.zero_grad()
        loss_of(model(batch(model, 0, rank))).backward()
        same_grads(model, expected(Mlp, world, "sgd", 1)[0][0], str(setting))


@on_ranks(2)
def test_an_evaluation_that_fails(rank: int, world: int) -> None:
    for setting in EVERY:
        model = setting.shard(make(Fragile), world)
        model.fails = "forward"
        with pytest.raises(ArithmeticError), torch.no_grad():
            model(batch(model, 0, rank))
        model.fails = ""
        loss_of(model(batch(model, 0, rank))).backward()
        same_grads(model, expected(Mlp, world, "sgd", 1)[0][0], str(setting))
