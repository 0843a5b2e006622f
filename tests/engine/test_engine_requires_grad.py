"""`requires_grad` switched at any moment, on whatever form modules hold then: a plain model that is
told to do the same has the same gradients.

All ranks have the same data, so the mean over them is anyone's gradient, to the bit on 2 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import (
    HYBRID_STRATEGIES,
    STRATEGIES,
    Setting,
    batch,
    is_exact,
    loss_of,
    make,
    same_grads,
    settings,
)
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.core.state import units_in


class Adapted(nn.Module):
    """A frozen layer with a trainable adapter of low rank beside it."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(features, features).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.is_on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return torch.tanh(y + self.up(self.down(x)) if self.is_on else y)


class Stack(nn.Module):
    """Three adapted layers, each a unit; adapter and norm of the root are the root's."""

    features = 8
    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), Adapted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(self.norm(x))


def switch(model: nn.Module, on: bool) -> None:
    """What PEFT's `disable_adapter` does."""
    for layer in model.modules():
        if isinstance(layer, Adapted):
            layer.is_on = on
            layer.down.requires_grad_(on)
            layer.up.requires_grad_(on)


def reference_behind(model: Any, x: torch.Tensor) -> None:
    policy = model(x)
    switch(model, False)
    with torch.no_grad():
        reference = model(x)
    switch(model, True)
    (loss_of(policy) + (policy - reference).square().mean()).backward()


def reference_with_gradients(model: Any, x: torch.Tensor) -> None:
    policy = model(x)
    switch(model, False)
    reference = model(x)
    switch(model, True)
    (loss_of(policy) + (policy - reference).square().mean()).backward()


def frozen_evaluation(model: Any, x: torch.Tensor) -> None:
    policy = model(x)
    flags = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(False)
    model(x * 2)
    for p, flag in zip(model.parameters(), flags, strict=True):
        p.requires_grad = flag
    loss_of(policy).backward()


def frozen_behind(model: Any, x: torch.Tensor) -> None:
    """For good: the adapters of the root and of the first layer get nothing in this backward."""
    out = model(x)
    model.layers[0].down.requires_grad_(False)
    model.head.up.requires_grad_(False)
    loss_of(out).backward()


def thawed_behind(model: Any, x: torch.Tensor) -> None:
    """What was frozen in the forward is in no graph."""
    model.layers[1].down.requires_grad_(False)
    model.norm.requires_grad_(False)
    out = model(x)
    model.requires_grad_(True)
    loss_of(out).backward()


def through_old_references(model: Any, x: torch.Tensor) -> None:
    """Somebody holds parameters from before the forward, or from behind it."""
    rest = list(model.head.parameters()) + list(model.layers[0].parameters())
    out = model(x)
    later = list(model.norm.parameters()) + list(model.layers[1].parameters())
    for p in rest:
        p.requires_grad_(False)
    loss_of(out).backward()
    for p in later:
        p.requires_grad_(False)
    loss_of(model(x)).backward()


SCENES = (
    reference_behind,
    reference_with_gradients,
    frozen_evaluation,
    frozen_behind,
    thawed_behind,
    through_old_references,
)


def agree(model: Any, plain: nn.Module, what: str) -> None:
    wanted = {n: p.requires_grad for n, p in plain.named_parameters()}
    for unit in units_in(model):
        for param in unit.params:
            forms = [f for f in (param.sharded, param.full, param.between) if f is not None]
            assert {f.requires_grad for f in forms} == {wanted[param.name]}, f"{what} {param.name}"


def run(setting: Setting, scene: Callable[..., None], world: int, *, recomputes: bool) -> None:
    """Twice, with an accumulation in between, and a usual step behind it."""
    plain, model = make(Stack), setting.shard(make(Stack), world)
    what = f"{setting} {scene.__name__} {'recomputed' if recomputes else ''}"
    exact = is_exact(setting, world)
    x = batch(Stack, 0, 0)
    for m in (plain, model):
        m.recomputes = recomputes
    for step in range(2):
        for m in (plain, model):
            switch(m, True)
            m.zero_grad()
        if step:
            with sw.no_sync(model):
                scene(model, x)
            scene(plain, x)
        for m in (plain, model):
            scene(m, x)
        loss_of(plain(x)).backward()
        loss_of(model(x)).backward()
        agree(model, plain, what)
        wanted = {n: p.grad for n, p in plain.named_parameters()}
        same_grads(model, wanted, what, exact=exact and not step)


EVERY = settings(*STRATEGIES, reshard=(None, True, False))
WIDE = settings(*HYBRID_STRATEGIES, reshard=(2,))


@pytest.mark.parametrize("scene", SCENES, ids=lambda s: s.__name__)
@on_ranks(2, timeout_s=120)
def test_as_plain(scene: Callable[..., None], rank: int, world: int) -> None:
    for setting in EVERY:
        run(setting, scene, world, recomputes=False)
    if (
        scene in SCENES[:3]
    ):  # plain checkpointing refuses the others: another graph when it recomputes
        for setting in settings("full_shard", "shard_grad_op"):
            run(setting, scene, world, recomputes=True)


@pytest.mark.parametrize("setting", WIDE, ids=str)
@on_ranks(4, timeout_s=120)
def test_as_plain_on_four(setting: Setting, rank: int, world: int) -> None:
    for scene in SCENES:
        run(setting, scene, world, recomputes=False)


@on_ranks(2)
def test_flags_of_the_gathered_form_outlive_it(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Stack), world)
    loss_of(model(batch(Stack, 0, 0))).backward()
    model.layers[0].unshard()
    model.layers[0].up.requires_grad_(False)
    model.layers[0].base.weight.requires_grad_(True)
    model.layers[0].reshard()
    assert not model.layers[0].up.weight.requires_grad
    assert model.layers[0].base.weight.requires_grad
    model.zero_grad()
    loss_of(model(batch(Stack, 0, 0))).backward()
    assert model.layers[0].up.weight.grad is None
    assert model.layers[0].base.weight.grad is not None
