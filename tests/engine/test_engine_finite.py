"""nan and inf in gradients: parameter and rank are named on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engine_kit import (
    HYBRID_STRATEGIES,
    STRATEGIES,
    Setting,
    Uneven,
    batch,
    grid,
    line,
    local,
    loss_of,
    make,
    settings,
)

import shardwise as sw
from ranks import on_ranks
from shardwise.errors import NonFiniteError


def backward(model: Any, rank: int) -> None:
    loss_of(model(batch(model, 0, rank))).backward()


def spoil(model: Any, name: str, value: float) -> bool:
    """Put `value` into this rank's part; False where it is empty."""
    part = local(dict(model.named_parameters())[name].grad)
    if part.numel():
        part.view(-1)[-1] = value
    return bool(part.numel())


@pytest.mark.parametrize("setting", settings(*STRATEGIES), ids=str)
@on_ranks(2, 3)
def test_named_on_every_rank(setting: Setting, rank: int, world: int) -> None:
    model = setting.shard(make(Uneven), world)
    backward(model, rank)
    sw.check_finite(model)
    before = [local(p.grad).clone() for p in model.parameters()]
    culprit = world - 1
    if rank == culprit:
        spoil(model, "layers.0.0.weight", math.nan)
        spoil(model, "layers.0.2.weight", -math.inf)
    for check in (
        lambda: sw.check_finite(model),
        lambda: sw.clip_grad_norm_(model.parameters(), 1e-3, error_if_nonfinite=True),
    ):
        with pytest.raises(NonFiniteError) as caught:
            check()
        text = str(caught.value)
        assert f"layers.0.0.weight (nan on rank {culprit})" in text, text
        assert f"layers.0.2.weight (inf on rank {culprit})" in text, text
        assert caught.value.where == {
            "layers.0.0.weight": [culprit],
            "layers.0.2.weight": [culprit],
        }
    if rank != culprit:
        for p, want in zip(model.parameters(), before, strict=True):
            assert torch.equal(local(p.grad), want), "nothing was scaled"


@on_ranks(4)
def test_on_a_hybrid_mesh(rank: int, world: int) -> None:
    """Ranks of both axes learn of it, whichever holds it; shards may be empty."""
    for setting in settings(*HYBRID_STRATEGIES):
        model = setting.shard(make(Uneven), world)
        backward(model, rank)
        sw.check_finite(model)
        holder = 2 if setting.strategy == "hybrid_shard" else 0
        if rank == holder:
            assert spoil(model, "layers.2.0.weight", math.inf), "it has the only row"
        text = rf"layers\.2\.0\.weight \(inf on rank {holder}\)"
        with pytest.raises(NonFiniteError, match=text):
            sw.check_finite(model)
        with pytest.raises(RuntimeError, match=text):
            sw.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@on_ranks(4)
def test_several_meshes_and_plain_parameters(rank: int, world: int) -> None:
    """A plain gradient that only one rank has spoiled is an error on all, too."""
    model: Any = make(Uneven)
    ignored = set(model.layers[2].parameters())
    sw.fully_shard(model.layers[0], mesh=grid(2, 2))
    sw.fully_shard(model, mesh=line(world), ignored_params=ignored)
    for name, value, who in (
        ("layers.0.0.weight", math.nan, 3),
        ("layers.1.0.weight", math.inf, 0),
        ("layers.2.0.bias", math.nan, 1),
    ):
        model.zero_grad()
        backward(model, rank)
        sw.check_finite(model)
        if rank == who:
            assert spoil(model, name, value)
        kind = "nan" if math.isnan(value) else "inf"
        with pytest.raises(NonFiniteError, match=rf"{name} \({kind} on rank {who}\)"):
            sw.check_finite(model)
        shown = name if who != 1 else r"parameter 10 of shape \(1,\)"
        with pytest.raises(NonFiniteError, match=rf"{shown} \({kind} on rank {who}\)"):
            sw.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@on_ranks(2)
def test_a_norm_that_overflows(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Uneven), world)
    backward(model, rank)
    spoil(model, "layers.0.0.weight", 1e30)
    sw.check_finite(model)
    with pytest.raises(NonFiniteError, match="all gradients are finite, but their norm is not"):
        sw.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@on_ranks(2)
def test_while_accumulating_and_without_gradients(rank: int, world: int) -> None:
    for setting in settings("full_shard"):
        model = setting.shard(make(Uneven), world)
        sw.check_finite(model)
        with sw.no_sync(model):
            x = batch(model, 0, rank)
            (loss_of(model(x)) * (math.nan if rank else 1.0)).backward()
        with pytest.raises(NonFiniteError, match=r"layers\.0\.0\.weight \(nan on ranks 0, 1\)"):
            sw.check_finite(model)
