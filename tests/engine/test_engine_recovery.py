"""After an exception on one rank or on all, in forward, backward or recomputation, the next step is
right; loss scaling and flattening over shards.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import (
    Mlp,
    Plain,
    Setting,
    batch,
    expected,
    full,
    grid,
    line,
    local,
    loss_of,
    make,
    same_grads,
    settings,
)
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from ranks import on_ranks
from shardwise._torch_compat import graph_task
from shardwise.errors import EngineError, ShardwiseError

EVERY = settings("full_shard", "shard_grad_op", "no_shard", reshard=(False,))


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: Any) -> torch.Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.model.fails == "backward":
            raise ctx.model.error
        return grads[0], None


class Fragile(Mlp):
    """Fails behind its second layer when told to; layers may be recomputed in the backward."""

    fails = ""
    recomputes = False
    error: BaseException = ArithmeticError("boom")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if self.recomputes:
                x = checkpoint(self.one, i, layer, x, use_reentrant=False)
            else:
                x = self.one(i, layer, x)
        return self.norm(x)

    def one(self, i: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if i == 1 and self.fails == "recompute" and graph_task() is not None:
            raise self.error
        x = torch.tanh(layer(x))
        if i == 1:
            if self.fails == "forward":
                raise self.error
            x = Boom.apply(x, self)
        return x


def fail(model: Any, where: str, rank: int, culprits: tuple[int, ...]) -> None:
    """A step that some ranks do not survive; the others learn of it."""
    model.fails = where if rank in culprits else ""
    model.recomputes = where == "recompute"
    kinds = (type(model.error), ShardwiseError)
    with pytest.raises(type(model.error) if rank in culprits else kinds):
        loss_of(model(batch(model, 9, rank))).backward()
    model.fails, model.recomputes = "", False


@pytest.mark.parametrize("where", ["forward", "backward", "recompute"])
@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(2, timeout_s=120)
def test_on_all_ranks(setting: Setting, where: str, rank: int, world: int) -> None:
    errors = (
        torch.OutOfMemoryError("CUDA out of memory"),
        KeyboardInterrupt(),
        FloatingPointError("the loss is nan"),
    )
    model = setting.shard(make(Fragile), world)
    for error in errors:
        model.error = error
        fail(model, where, rank, (0, 1))
        model.zero_grad()
        loss_of(model(batch(model, 0, rank))).backward()
        same_grads(model, expected(Mlp, world, "sgd", 1)[0][0], f"{setting} {error!r}")
        model.zero_grad()


@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(2)
def test_where_gradients_are_delivered(setting: Setting, rank: int, world: int) -> None:
    """A parameter's hook fails on both ranks, once its gradient is reduced. One comes later than
    the other and still sees its own exception.
    """
    model = setting.shard(make(Mlp), world)
    for late in (0, 1):

        def fails(_: torch.Tensor) -> None:
            raise ArithmeticError("boom")

        def sleeps(_: torch.Tensor, late: int = late) -> None:
            time.sleep(0.1 * (rank == late))

        hook = model.layers[2].weight.register_post_accumulate_grad_hook(fails)
        x = batch(model, 9, rank).requires_grad_()
        x.register_hook(sleeps)
        with pytest.raises(ArithmeticError):
            loss_of(model(x)).backward()
        hook.remove()
        model.zero_grad()
        loss_of(model(batch(model, 0, rank))).backward()
        same_grads(model, expected(Mlp, world, "sgd", 1)[0][0], str(setting))
        model.zero_grad()


@pytest.mark.parametrize("where", ["forward", "backward", "recompute"])
@on_ranks(2, timeout_s=120)
def test_while_accumulating_and_recomputing(where: str, rank: int, world: int) -> None:
    """What earlier micro-batches added up without sync is there after an exception in a forward.
    One in a backward has added to some of it: refused until zero_grad(), of either kind.
    """
    for setting in EVERY:
        model = setting.shard(make(Fragile), world)
        want = setting.shard(make(Mlp), world)
        for clears in (True, False):
            model.zero_grad()
            want.zero_grad()
            with sw.no_sync(model), sw.no_sync(want):
                loss_of(model(batch(model, 5, rank))).backward()
                if not clears:
                    loss_of(want(batch(model, 5, rank))).backward()
                fail(model, where, rank, (0, 1))
            if clears:
                model.zero_grad(set_to_none=where == "backward")
            loss = loss_of(model(batch(model, 0, rank)))
            if where != "forward" and not clears:
                with pytest.raises(
                    EngineError, match=r"layers\.2\.weight.* hold a part of a backw"
                ):
                    loss.backward()
                continue
            loss.backward()
            loss_of(want(batch(model, 0, rank))).backward()
            for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
                assert torch.equal(local(p.grad), local(q.grad)), f"{setting} {where} {name}"


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("setting", settings("full_shard", "shard_grad_op"), ids=str)
@on_ranks(2, timeout_s=120)
def test_on_one_rank(setting: Setting, where: str, rank: int, world: int) -> None:
    """The other rank gets an error that names it. Afterwards both go on, and are right."""
    if setting.transport == "c10d":
        pytest.skip("a collective without its partner stays in the process group")
    model = setting.shard(make(Fragile), world)
    for culprit in (0, 1):
        fail(model, where, rank, (culprit,))
        model.reset_iter_state()
        model.zero_grad()
        loss_of(model(batch(model, 0, rank))).backward()
        same_grads(model, expected(Mlp, world, "sgd", 1)[0][0], str(setting))


# -- loss scaling
@pytest.mark.parametrize("hybrid", [False, True])
@on_ranks(4)
def test_grad_scaler(hybrid: bool, rank: int, world: int) -> None:
    """An inf on one rank: all skip the step and halve the scale."""
    for transport in ("c10d", "shared_memory"):
        model = make(Mlp)
        mesh = grid(2, 2) if hybrid else line(world)
        for layer in model.layers:
            sw.fully_shard(layer, mesh=mesh, transport=transport)
        sw.fully_shard(model, mesh=mesh, transport=transport)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        before = [local(p).clone() for p in model.parameters()]
        last = before
        for culprit in (None, 0, 3):
            opt.zero_grad()
            scaler.scale(loss_of(model(batch(model, 0, rank)))).backward()
            if rank == culprit:
                local(model.layers[1].weight.grad).view(-1)[0] = math.inf
            scale = scaler.get_scale()
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            halved = scaler.get_scale() < scale
            assert halved == (culprit is not None), f"{transport} {culprit} {hybrid}"
            moved = any(
                not torch.equal(local(p), b)
                for p, b in zip(model.parameters(), before, strict=True)
            )
            assert moved
            if culprit is not None:
                for p, b in zip(model.parameters(), last, strict=True):
                    assert torch.equal(local(p), b), "the step was skipped"
            last = [local(p).clone() for p in model.parameters()]


# -- flattening
@on_ranks(2, 3)
def test_flattening_and_lbfgs(rank: int, world: int) -> None:
    """Even cuts work; uneven ones are refused with parameter and remedy."""
    model = Setting("full_shard").shard(make(Mlp), world)
    plain = make(Mlp)
    model(batch(model, 0, 0))  # names the parameters in full
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = loss_of(model(batch(model, 0, 0)))
        loss.backward()
        return loss

    if world == 3:
        with pytest.raises(EngineError, match=r"layers\.0\.weight.*shard another dim"):
            nn.utils.parameters_to_vector(model.parameters())
        with pytest.raises(EngineError, match="LBFGS and parameters_to_vector need"):
            opt.step(closure)
        return
    flat = nn.utils.parameters_to_vector(model.parameters())
    want = nn.utils.parameters_to_vector(plain.parameters())
    assert torch.equal(flat.full_tensor().detach(), want.detach())
    opt.step(closure)
    reference = torch.optim.LBFGS(plain.parameters(), lr=0.1, max_iter=4)

    def plain_closure() -> torch.Tensor:
        reference.zero_grad()
        loss = loss_of(plain(batch(plain, 0, 0)))
        loss.backward()
        return loss

    reference.step(plain_closure)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=1e-4, atol=1e-5)


@on_ranks(4)
def test_a_first_forward_that_fails_on_one_rank_leaves_nobody_in_new_groups(
    rank: int, world: int
) -> None:
    """Groups of a smaller world are made with the unit, by all ranks, not when it first runs."""
    setting = Setting(None, "shared_memory", 2)
    model, plain = setting.shard(make(Mlp), world), Plain(make(Mlp), world)
    register = model.layers[0].register_forward_hook(lambda *_: 1 / 0) if rank == 1 else None
    with pytest.raises((ZeroDivisionError, ShardwiseError)):
        loss_of(model(batch(Mlp, 0, rank))).backward()
    if register is not None:
        register.remove()
    model.zero_grad()
    plain.step(1)
    loss_of(model(batch(Mlp, 1, rank))).backward()
    for name, p in model.named_parameters():
        assert torch.equal(full(p.grad), plain.grads()[name]), name
