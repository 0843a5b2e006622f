"""Clipping by the global norm: ours over any mix of gradients, torch's own over sharded ones."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import (
    HYBRID_STRATEGIES,
    STRATEGIES,
    Setting,
    Uneven,
    all_agree,
    batch,
    full,
    grid,
    line,
    local,
    loss_of,
    make,
    part,
    settings,
)
from torch.nn.utils import clip_grad_norm_ as torch_clip

import shardwise as sw
from ranks import on_ranks

NORMS = (1.0, 2.0, 3.5, math.inf)


def with_grads(model: Any, plain: nn.Module) -> None:
    """The same pseudo-random gradients in both, of a size that differs from tensor to tensor."""
    generator = torch.Generator().manual_seed(3)
    for i, (p, q) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
        q.grad = torch.randn(q.shape, generator=generator) * 10.0 ** (i % 3 - 1)
        p.grad = p.detach().clone().copy_(q.grad)


def check(clip: Any, model: Any, plain: nn.Module, norm_type: float, what: str) -> None:
    for max_norm in (0.5, 1e6):
        with_grads(model, plain)
        found = clip(model.parameters(), max_norm, norm_type)
        expected = torch_clip(plain.parameters(), max_norm, norm_type)
        found = full(found)
        assert found.shape == () and all_agree(found), what
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, msg=lambda m: f"{what}: {m}")
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(local(p.grad), part(q.grad, p), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("setting", settings(*STRATEGIES), ids=str)
@on_ranks(1, 2, 3)
def test_against_the_plain_model(setting: Setting, rank: int, world: int) -> None:
    plain = make(Uneven)
    model = setting.shard(copy.deepcopy(plain), world)
    for norm_type in NORMS:
        check(sw.clip_grad_norm_, model, plain, norm_type, f"shardwise, norm {norm_type}")
        check(torch_clip, model, plain, norm_type, f"torch, norm {norm_type}")


@on_ranks(4)
def test_on_two_by_two(rank: int, world: int) -> None:
    """Replicas count once; parts of 3, 1 and 2 rows leave some ranks without elements."""
    plain = make(Uneven)
    for setting in settings(*HYBRID_STRATEGIES):
        model = setting.shard(copy.deepcopy(plain), world)
        for norm_type in NORMS:
            what = f"{setting}, norm {norm_type}"
            check(sw.clip_grad_norm_, model, plain, norm_type, f"shardwise, {what}")
            check(torch_clip, model, plain, norm_type, f"torch, {what}")


@on_ranks(4)
def test_a_mix_of_meshes_and_plain_parameters(rank: int, world: int) -> None:
    plain = make(Uneven)
    model = copy.deepcopy(plain)
    ignored = set(model.layers[2].parameters())
    sw.fully_shard(model.layers[0], mesh=grid(2, 2))
    sw.fully_shard(model.layers[1], mesh=grid(2, 2), strategy="no_shard")
    sw.fully_shard(model, mesh=line(world), ignored_params=ignored)
    kinds = {str(getattr(p, "placements", "plain")) for p in model.parameters()}
    assert len(kinds) == 4, kinds
    for norm_type in NORMS:
        check(sw.clip_grad_norm_, model, plain, norm_type, f"norm {norm_type}")


@on_ranks(2)
def test_gradients_from_training(rank: int, world: int) -> None:
    for setting in settings(*STRATEGIES):
        for clip in (sw.clip_grad_norm_, torch_clip):
            plain = make(Uneven)
            model = setting.shard(copy.deepcopy(plain), world)
            loss_of(model(batch(model, 0, 0))).backward()
            loss_of(plain(batch(plain, 0, 0))).backward()
            found = full(clip(model.parameters(), 0.01))
            torch.testing.assert_close(found, torch_clip(plain.parameters(), 0.01))
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(local(p.grad), part(q.grad, p), rtol=1e-5, atol=1e-8)


@on_ranks(2)
def test_not_finite(rank: int, world: int) -> None:
    """An infinity on one rank is seen by all, and nothing is scaled."""
    model = Setting("full_shard").shard(make(Uneven), world)
    with_grads(model, make(Uneven))
    before = [p.grad.to_local().clone() for p in model.parameters()]
    grad = model.layers[0][0].weight.grad.to_local()
    if rank == 1:
        grad[0, 0] = math.inf
    with pytest.raises(RuntimeError, match=r"not finite: .*inf on rank 1"):
        sw.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    if rank == 0:
        for p, b in zip(model.parameters(), before, strict=True):
            assert torch.equal(p.grad.to_local(), b)
    assert sw.clip_grad_norm_(model.parameters(), 1.0).isinf()


@on_ranks(2)
def test_nothing_to_clip(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Uneven), world)
    assert sw.clip_grad_norm_(model.parameters(), 1.0) == 0.0
    assert sw.clip_grad_norm_(iter([]), 1.0) == 0.0
    with pytest.raises(ValueError, match="norm_type"):
        sw.clip_grad_norm_(model.parameters(), 1.0, norm_type=0.0)
