"""Ranks that run out of data: with `join` exact against a plain model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from engine_kit import HYBRID_STRATEGIES, Mlp, Setting, batch, full, loss_of, make, settings

import shardwise as sw
from ranks import on_ranks
from shardwise.errors import EngineError

EVERY = settings("full_shard", "shard_grad_op", "no_shard", reshard=(False,))
HYBRID = settings(*HYBRID_STRATEGIES)
COUNTS = (2, 4, 3, 1)  # batches of each rank


def batches_of(rank: int, world: int) -> list[torch.Tensor]:
    return [batch(Mlp, step, rank) for step in range(COUNTS[:world][rank])]


def close(got: Any, want: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(full(got), want, rtol=1e-5, atol=1e-6, msg=lambda m: f"{what}: {m}")


def check(model: Any, plain: torch.nn.Module, what: str) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(p, q.detach(), f"{what} {name}")


def plain_steps(world: int, accumulate: int, divide_by: str, steps: int) -> torch.nn.Module:
    """What one process computes from all ranks' batches."""
    model = make(Mlp)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    every = [batches_of(r, world) for r in range(world)]
    for index in range(steps):
        there = [b[index] for b in every if index < len(b)]
        divisor = len(there) if divide_by == "contributing" else world
        for x in there:
            (loss_of(model(x)) / divisor).backward()
        if (index + 1) % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            opt.step()
            opt.zero_grad()
    return model


def train(model: Any, batches: Any, accumulate: int) -> int:
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    index = -1
    for index, x in enumerate(batches):
        last = (index + 1) % accumulate == 0
        model.set_requires_gradient_sync(last)
        loss_of(model(x)).backward()
        if last:
            sw.clip_grad_norm_(model.parameters(), 0.05)
            opt.step()
            opt.zero_grad()
    return index + 1


@pytest.mark.parametrize("divide_by", ["contributing", "all"])
@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(3)
def test_continue(setting: Setting, divide_by: Any, rank: int, world: int) -> None:
    for accumulate in (1, 2):
        model = setting.shard(make(Mlp), world)
        own = batches_of(rank, world)
        batches = sw.join(model, own, mode="continue", divide_by=divide_by)
        assert train(model, batches, accumulate) == max(COUNTS[:world])
        plain = plain_steps(world, accumulate, divide_by, max(COUNTS[:world]))
        check(model, plain, f"{setting} {divide_by} {accumulate}")
        assert not batches.is_shadow


@pytest.mark.parametrize("setting", HYBRID, ids=str)
@on_ranks(4)
def test_continue_on_a_hybrid_mesh(setting: Setting, rank: int, world: int) -> None:
    model = setting.shard(make(Mlp), world)
    batches = sw.join(model, batches_of(rank, world), mode="continue")
    assert train(model, batches, 1) == 4
    check(model, plain_steps(world, 1, "contributing", 4), str(setting))


@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(2)
def test_stop(setting: Setting, rank: int, world: int) -> None:
    model = setting.shard(make(Mlp), world)
    assert train(model, sw.join(model, batches_of(rank, world)), 1) == min(COUNTS[:world])
    check(model, plain_steps(world, 1, "all", min(COUNTS[:world])), str(setting))
    # The loop is over: the next step is an ordinary one.
    x = batch(Mlp, 9, rank)
    loss_of(model(x)).backward()


@on_ranks(2)
def test_global_mean(rank: int, world: int) -> None:
    """A shadow has no tokens; everybody's are counted once."""
    for setting in EVERY:
        model = setting.shard(make(Mlp), world)
        rows = (3, 5)[rank]
        own = [batch(Mlp, step, rank, rows) for step in range(1 + rank)]
        batches = sw.join(model, own, mode="continue")
        for index, x in enumerate(batches):
            assert batches.is_shadow == (index >= len(own))
            assert batches.num_contributing == (2, 1)[index]
            model.zero_grad()
            sw.global_mean(model(x).sin().sum(), x.shape[0]).backward()
            plain = make(Mlp)
            there = [batch(Mlp, index, r, n) for r, n in enumerate((3, 5)) if index <= r]
            total = sum(t.shape[0] for t in there)
            for t in there:
                (plain(t).sin().sum() / total).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                close(p.grad, q.grad, str(setting))


@on_ranks(2)
def test_a_shadow_gives_nothing_not_even_nan(rank: int, world: int) -> None:
    for setting in EVERY:
        model = setting.shard(make(Mlp), world)
        batches = sw.join(model, [batch(Mlp, 0, rank)] * (1 + rank), mode="continue")
        for x in batches:
            model.zero_grad()
            (loss_of(model(x)) * (float("nan") if batches.is_shadow else 1.0)).backward()
        plain = make(Mlp)
        loss_of(plain(batch(Mlp, 0, 1))).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            close(p.grad, q.grad, str(setting))


@on_ranks(2)
def test_a_rank_without_any_batch(rank: int, world: int) -> None:
    for setting in settings("full_shard"):
        model = setting.shard(make(Mlp), world)
        own = [] if rank == 0 else [batch(Mlp, 0, 1)]
        with pytest.raises(ValueError, match=r"ranks \[0\] of the mesh have no batch at all"):
            list(sw.join(model, own, mode="continue"))
        assert list(sw.join(model, own)) == []
        spare = torch.zeros(1, 8)
        assert train(model, sw.join(model, own, mode="continue", spare=spare), 1) == 1
        assert list(sw.join(model, [], mode="continue")) == []


@on_ranks(2)
def test_an_exception_and_a_break(rank: int, world: int) -> None:
    """Afterwards gradients are those of everybody again."""
    for setting in settings("full_shard"):
        model = setting.shard(make(Mlp), world)
        own = [batch(Mlp, 0, rank)] * (1 + 2 * rank)
        for x in sw.join(model, own, mode="continue"):
            loss_of(model(x)).backward()
            break
        with pytest.raises(ArithmeticError):
            for i in itertools.chain(sw.join(model, own, mode="continue")):
                loss_of(model(i)).backward()
                if rank == 0 or i is not None:
                    raise ArithmeticError
        model.zero_grad()
        loss_of(model(batch(Mlp, 0, rank))).backward()
        plain = make(Mlp)
        for r in range(world):
            (loss_of(plain(batch(Mlp, 0, r))) / world).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            close(p.grad, q.grad, str(setting))


@on_ranks(2)
def test_what_is_refused(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Mlp), world)
    with pytest.raises(ValueError, match="mode must be 'stop' or 'continue', found 'pause'"):
        sw.join(model, [], mode="pause")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="divide_by must be"):
        sw.join(model, [], divide_by="me")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Mlp holds no sharded module"):
        sw.join(make(Mlp), [])


@on_ranks(2)
def test_no_reproducible_run_begins_where_ranks_weigh_differently(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Mlp), world)
    joined = iter(sw.join(model, range(1 + rank), mode="continue"))
    next(joined)
    next(joined)  # rank 0 has run out
    with pytest.raises(ValueError, match=r"is in a join\(\)"):
        sw.reproducible(model, num_micro_batches=4).__enter__()
    assert list(joined) == []
    with sw.reproducible(model, num_micro_batches=4):
        pass


@on_ranks(2)
def test_one_divisor(rank: int, world: int) -> None:
    """A count and a factor of the user's: neither wins in silence."""
    model = Setting("full_shard").shard(make(Mlp), world)
    model.set_gradient_divide_factor(3.0)
    with pytest.raises(EngineError, match=r"global_mean\(\) divides .* set_gradient_divide_factor"):
        sw.global_mean(loss_of(model(batch(Mlp, 0, rank))), 3).backward()
