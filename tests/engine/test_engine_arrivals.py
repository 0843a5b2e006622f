"""How gradients are heard of: large ones at once, small ones where the backward leaves their unit.
None is missed that comes without any other sign of a backward.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import STRATEGIES, TRANSPORTS, Mlp, Setting, batch, loss_of, make, same_grads

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.core import arrivals
from shardwise.engine.core.backward import BackwardPass
from shardwise.engine.core.unit import Unit


def heard(patch: Any) -> list[str]:
    """Names of parameters whose gradients the engine takes one by one, from here on."""
    names: list[str] = []
    arrived = BackwardPass.gradient_arrived

    def note(self: BackwardPass, unit: Unit, grads: Any, indices: tuple[int]) -> None:
        names.extend(grads.state.params[i].name for i in indices)
        arrived(self, unit, grads, indices)

    patch.setattr(BackwardPass, "gradient_arrived", note)
    return names


@on_ranks(2)
def test_small_gradients_are_taken_together(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Mlp), world)
    with pytest.MonkeyPatch.context() as patch:
        names = heard(patch)
        loss_of(model(batch(Mlp, 0, rank))).backward()
        assert names == []
        model.zero_grad()
        patch.setattr(arrivals, "SMALL_BYTES", 4 * 8 * 8 - 1)  # biases stay small, weights do not
        other = Setting("full_shard").shard(make(Mlp), world)
        loss_of(other(batch(Mlp, 0, rank))).backward()
        assert sorted(names) == [f"layers.{i}.weight" for i in range(3)]
        names.clear()
        patch.setattr(arrivals, "ALL_SMALL_BYTES", 4 * 8)  # one bias or norm vector of a bucket
        patch.setattr(arrivals, "SMALL_BYTES", 4 * 8)
        third = Setting("full_shard").shard(make(Mlp), world)
        loss_of(third(batch(Mlp, 0, rank))).backward()
        assert sorted(names) == [*(f"layers.{i}.weight" for i in range(3)), "norm.bias"]


@on_ranks(2)
def test_large_gradients_leave_at_once(rank: int, world: int) -> None:
    """When the gradient of a layer's input is there, its weight's accumulator is empty already."""
    model = Setting("full_shard").shard(make(Mlp), world)
    seen: list[tuple[bool, bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "SMALL_BYTES", 4 * 8)
        x = batch(Mlp, 0, rank).requires_grad_(True)
        unit = model.layers[0]._shardwise_state.unit

        def look(_grad: torch.Tensor) -> None:
            params = {p.name: p.full.grad for p in unit.params}
            seen.append((params["layers.0.weight"] is None, params["layers.0.bias"] is None))

        x.register_hook(look)  # before the engine's own
        loss_of(model(x)).backward()
    assert seen == [(True, False)]


class WithAux(nn.Module):
    """Layers that leave a loss of their own behind, which no output shows."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Leaving() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Leaving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))
        self.aux: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = (self.gain * x.detach()).square().mean()
        return torch.tanh(self.linear(x)) * self.gain


def aux_alone(model: Any, x: torch.Tensor) -> None:
    model(x)
    model.layers[1].aux.backward()


def aux_after(model: Any, x: torch.Tensor) -> None:
    loss_of(model(x)).backward()
    model.layers[0].aux.backward()


def aux_with(model: Any, x: torch.Tensor) -> None:
    (loss_of(model(x)) + model.layers[0].aux + model.layers[1].aux).backward()


@pytest.mark.parametrize("run", [aux_alone, aux_after, aux_with], ids=lambda f: f.__name__)
@on_ranks(2)
def test_losses_that_no_output_shows(run: Any, rank: int, world: int) -> None:
    """Each backward is noticed, by whatever gradient comes."""
    for strategy in STRATEGIES:
        for transport in TRANSPORTS:
            plain = make(WithAux)
            model = Setting(strategy, transport).shard(copy.deepcopy(plain), world)
            x = batch(WithAux, 0, 0)  # the same on all ranks, so the mean is anyone's
            run(plain, x)
            run(model, x)
            same_grads(model, {n: p.grad for n, p in plain.named_parameters()}, f"{strategy}")


@on_ranks(2)
def test_a_backward_that_fails(rank: int, world: int) -> None:
    """Hooks are heard again after an exception in the middle of a backward."""
    model = Setting("full_shard").shard(make(WithAux), world)
    x = batch(WithAux, 0, 0)
    out = model(x)

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("on purpose")

    handle = model.layers[0].linear.register_full_backward_pre_hook(lambda *_: fail(x))
    out = model(x)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(out).backward()
    handle.remove()
    model.zero_grad()
    plain = make(WithAux)
    aux_alone(plain, x)
    aux_alone(model, x)
    same_grads(model, {n: p.grad for n, p in plain.named_parameters()}, "after an exception")


@on_ranks(2)
def test_a_gradient_that_comes_late(rank: int, world: int) -> None:
    """A unit that is complete may get more in the same backward, from a reentrant checkpoint: what
    comes is reduced too.
    """
    plain = make(Mlp)
    model = Setting("full_shard").shard(copy.deepcopy(plain), world)

    def twice(m: Any) -> None:
        x = batch(Mlp, 0, 0)
        hidden = torch.utils.checkpoint.checkpoint(
            lambda t: torch.tanh(m.layers[0](t)), x.requires_grad_(True), use_reentrant=True
        )
        (loss_of(m(x)) + hidden.square().mean()).backward()

    twice(plain)
    twice(model)
    same_grads(model, {n: p.grad for n, p in plain.named_parameters()}, "late")


@on_ranks(2)
def test_frozen_in_between(rank: int, world: int) -> None:
    """Frozen after the forward: its gradient is dropped."""
    model = Setting("full_shard").shard(make(Mlp), world)
    loss = loss_of(model(batch(Mlp, 0, rank)))
    model.layers[1].bias.requires_grad_(False)
    loss.backward()
    assert model.layers[1].bias.grad is None
    assert model.layers[1].weight.grad is not None
    model.zero_grad()
    loss_of(model(batch(Mlp, 0, rank))).backward()
    assert model.layers[1].bias.grad is None
    with sw.no_sync(model):
        loss_of(model(batch(Mlp, 1, rank))).backward()
    loss_of(model(batch(Mlp, 1, rank))).backward()
    assert model.layers[2].weight.grad is not None
