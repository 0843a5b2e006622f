"""A write to the parameters between two forwards is seen by the next forward, on all ranks.

Copies of full parameters outlive a forward under the strategies that keep them, and between
forward and backward under `reshard_after_forward=False`. Each way of writing changes the sharded
model and a plain one alike; the outputs must then be bit-equal, with and without gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from engine_kit import (
    HYBRID_STRATEGIES,
    STRATEGIES,
    Setting,
    Uneven,
    batch,
    full,
    make,
    part,
    settings,
    weights_of,
)

import shardwise as sw
from ranks import on_ranks
from shardwise.errors import EngineError

Write = Callable[[Any, nn.Module], None]


def pairs(model: nn.Module, plain: nn.Module) -> Any:
    return zip(model.parameters(), plain.parameters(), strict=True)


def changed(q: torch.Tensor) -> torch.Tensor:
    return q.detach() * 0.9 + 0.05


def optimizer_step(model: Any, plain: nn.Module) -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        for m in (model, plain):
            for p in m.parameters():
                p.grad = p.detach().clone()
            kind(m.parameters(), lr=0.1).step()
            m.zero_grad()


def foreach_and_fused_steps(model: Any, plain: nn.Module) -> None:
    for options in ({"foreach": True}, {"fused": True}):
        for m in (model, plain):
            for p in m.parameters():
                p.grad = p.detach().clone()
            torch.optim.SGD(m.parameters(), lr=0.1, **options).step()
            m.zero_grad()


def data_copy(model: Any, plain: nn.Module) -> None:
    for p, q in pairs(model, plain):
        new = changed(q)
        p.data.copy_(new)
        q.data.copy_(new)


def copy_without_grad(model: Any, plain: nn.Module) -> None:
    with torch.no_grad():
        for p, q in pairs(model, plain):
            new = changed(q)
            p.copy_(new)
            q.copy_(new)


def in_place_arithmetic(model: Any, plain: nn.Module) -> None:
    with torch.no_grad():
        for m in (model, plain):
            for p in m.parameters():
                p.mul_(0.9).add_(0.02)
                p += 0.01
            torch._foreach_mul_(list(m.parameters()), 1.1)


def write_through_a_view(model: Any, plain: nn.Module) -> None:
    with torch.no_grad():
        for m in (model, plain):
            for p in m.parameters():
                p.detach().mul_(1.05)
                p.data.view(p.shape).sub_(0.01)


def load_sharded(model: Any, plain: nn.Module) -> None:
    plain.load_state_dict({n: changed(q) for n, q in plain.state_dict().items()})
    state = {n: t.detach() * 0.9 + 0.05 for n, t in model.state_dict().items()}
    model.load_state_dict(state)


def load_whole(model: Any, plain: nn.Module) -> None:
    state = {n: changed(q) for n, q in plain.state_dict().items()}
    model.load_state_dict(state)
    plain.load_state_dict(state)


def initialise(model: Any, plain: nn.Module) -> None:
    for m in (model, plain):
        torch.manual_seed(7)
        for p in m.parameters():
            nn.init.normal_(p, std=0.3)
        for p in m.parameters():
            nn.init.uniform_(p, -0.2, 0.4)
        nn.init.constant_(next(m.parameters()), 0.2)


def average_swapped_in(model: Any, plain: nn.Module) -> None:
    """Evaluate with an exponential moving average, then put the weights back."""
    for m in (model, plain):
        average = [p.detach().clone() * 0.5 for p in m.parameters()]
        with torch.no_grad():
            for a, p in zip(average, m.parameters(), strict=True):
                a.lerp_(p, 0.3)
                kept = p.detach().clone()
                p.copy_(a)
                a.copy_(kept)


def data_swapped(model: Any, plain: nn.Module) -> None:
    for m in (model, plain):
        average = [p.detach().clone() * 0.5 for p in m.parameters()]
        for a, p in zip(average, m.parameters(), strict=True):
            a.data, p.data = p.data.clone(), a.data


def marked_by_hand(model: Any, plain: nn.Module) -> None:
    for p in model.parameters():
        p.to_local().detach().numpy()[...] *= 0.5
    sw.mark_dirty(model)
    for q in plain.parameters():
        q.detach().mul_(0.5)


WRITES: list[Write] = [
    optimizer_step,
    foreach_and_fused_steps,
    data_copy,
    copy_without_grad,
    in_place_arithmetic,
    write_through_a_view,
    load_sharded,
    load_whole,
    initialise,
    average_swapped_in,
    data_swapped,
    marked_by_hand,
]


def agree(model: Any, plain: nn.Module, x: torch.Tensor, what: str) -> None:
    assert torch.equal(model(x), plain(x)), f"{what}: forward with gradients"
    with torch.no_grad():
        assert torch.equal(model(x), plain(x)), f"{what}: forward without gradients"


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__)
@on_ranks(2)
def test_writes_are_seen(write: Write, rank: int, world: int) -> None:
    for setting in settings(*STRATEGIES, reshard=(False, None)):
        plain = make(Uneven)
        model = setting.shard(copy.deepcopy(plain), world)
        x = batch(Uneven, 0, rank)
        agree(model, plain, x, f"{setting} before {write.__name__}")
        for _ in range(2):
            write(model, plain)
            agree(model, plain, x, f"{setting} after {write.__name__}")


@on_ranks(4)
def test_writes_are_seen_on_two_by_two(rank: int, world: int) -> None:
    for setting in settings(*HYBRID_STRATEGIES):
        plain = make(Uneven)
        model = setting.shard(copy.deepcopy(plain), world)
        for write in WRITES:
            write(model, plain)
            agree(model, plain, batch(Uneven, 0, rank), f"{setting} after {write.__name__}")


@on_ranks(2, 3)
def test_a_write_on_one_rank_reaches_the_others(rank: int, world: int) -> None:
    """Kept copies are whole: a rank that changes its rows changes those of everybody, at the next
    forward with gradients. Without, ranks go by what they wrote themselves.
    """
    for setting in settings("shard_optimizer", "shard_grad_op", "full_shard"):
        plain = make(Uneven)
        model = setting.shard(copy.deepcopy(plain), world)
        x = batch(Uneven, 0, 0)
        model(x)
        for writer in range(world):
            if rank == writer:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(2.0)
            for q, p in zip(plain.parameters(), model.parameters(), strict=True):
                rows = q.data.chunk(world)
                if writer < len(rows):
                    rows[writer].mul_(2.0)
                assert torch.equal(p.to_local(), part(q, p))
            for has_grad in (True, False):
                with torch.set_grad_enabled(has_grad):
                    assert torch.equal(model(x), plain(x)), f"{setting}: rank {writer} wrote"


@on_ranks(2)
def test_a_write_between_forward_and_backward_keeps_the_forward_weights(
    rank: int, world: int
) -> None:
    """Kept copies: the backward uses the weights of its forward, as saved tensors would be."""
    for setting in settings("shard_optimizer", "shard_grad_op", reshard=(False,)):
        plain = make(Uneven)
        model = setting.shard(copy.deepcopy(plain), world)
        x = batch(Uneven, 0, 0)
        shards = list(model.parameters())  # reshard_False registers full parameters after forward
        loss = model(x).square().sum()
        with torch.no_grad():
            for p in shards:
                p.mul_(3.0)
        loss.backward()
        plain(x).square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(p.grad), q.grad), str(setting)


@on_ranks(1, 2)
def test_a_write_between_forward_and_backward_where_no_copy_is_left(rank: int, world: int) -> None:
    """Released, or the shards themselves: autograd refuses, and the next step is right."""
    for setting in settings("full_shard", "no_shard"):
        plain = make(Uneven)
        model = setting.shard(copy.deepcopy(plain), world)
        x = batch(Uneven, 0, 0)
        shards = list(model.parameters())
        loss = model(x).square().sum()
        with torch.no_grad():
            for p in (*shards, *plain.parameters()):
                p.mul_(3.0)
        with pytest.raises(EngineError, match="released or written since"):
            loss.backward()
        model.zero_grad()
        for m in (plain, model):
            m(x).square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(p.grad), q.grad), str(setting)


@on_ranks(2)
def test_nobody_sees_half_of_a_step(rank: int, world: int) -> None:
    """Ranks that come early or late to the next forward read the same version of the weights."""
    for setting in (Setting(s, "shared_memory") for s in STRATEGIES):
        model = setting.shard(make(Uneven), world)
        x = batch(Uneven, 0, 0)
        for step in range(30):
            if (step + rank) % 3 == 0:
                torch.randn(60_000).sort()  # one of the two is late
            with torch.no_grad():
                out = model(x)
                for p in model.parameters():
                    p.add_(0.01)
            outs = [torch.empty_like(out) for _ in range(world)]
            dist.all_gather(outs, out)
            assert all(torch.equal(o, out) for o in outs), f"{setting} step {step}"
        weights_of(model)


@on_ranks(2)
def test_a_frozen_teacher_that_is_called_with_gradients_on(rank: int, world: int) -> None:
    """Nothing waits for a backward of it, so between calls its parameters may be written."""
    for setting in settings(*STRATEGIES, reshard=(False, None)):
        plain = [make(Uneven), make(Uneven).requires_grad_(False)]
        student, teacher = (setting.shard(copy.deepcopy(m), world) for m in plain)
        x = batch(Uneven, 0, rank)
        for _ in range(2):
            target, expected = teacher(x), plain[1](x)
            assert torch.equal(target, expected), f"{setting}"
            (student(x) - target).square().mean().backward()
            with torch.no_grad():
                for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                    ours.lerp_(theirs, 0.3)
                for ours, theirs in zip(plain[1].parameters(), plain[0].parameters(), strict=True):
                    ours.lerp_(theirs, 0.3)
