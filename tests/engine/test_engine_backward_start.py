"""What hooks on tensors cannot tell of a backward: gradients asked for parameters, losses on what
was kept from inside of a unit, exceptions.

All ranks have the same data, so a plain model on it says what is right, to the bit on 2 ranks.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from engine_kit import (
    STRATEGIES,
    Mlp,
    Setting,
    batch,
    full,
    loss_of,
    make,
    same,
    same_grads,
    same_weights,
    settings,
)

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.tensor.shard_tensor import ShardTensor
from shardwise.errors import EngineError

EVERY = settings(*STRATEGIES, reshard=(None, True, False))
FEW = settings("full_shard", "shard_grad_op", reshard=(False,))


def both(setting: Setting, world: int, cls: Callable[[], nn.Module] = Mlp) -> tuple[Any, Any]:
    return make(cls), setting.shard(make(cls), world)


def same_gradients(plain: nn.Module, model: Any, what: str) -> None:
    same_grads(model, {n: p.grad for n, p in plain.named_parameters()}, what)


def same_step(plain: nn.Module, model: Any, what: str) -> None:
    for m in (plain, model):
        m.zero_grad()
        loss_of(m(batch(plain, 1, 0))).backward()
    same_gradients(plain, model, f"{what}, the next step")
    for m in (plain, model):
        m.zero_grad()


# -- transforms ----------------------------------------------------------------------------------
@on_ranks(2)
def test_gradients_of_inputs_by_transforms(rank: int, world: int) -> None:
    """`torch.func.grad` and friends for the inputs of a model whose parameters train: its backward
    ends inside of the transform, and training goes on.
    """
    for setting in settings("full_shard", "no_shard"):
        plain, model = both(setting, world)
        x, found = batch(plain, 0, 0), []
        for m in (plain, model):
            loss = functools.partial(lambda of, t: loss_of(of(t)), m)
            found.append((torch.func.grad(loss)(x), torch.func.vmap(torch.func.jacrev(m))(x)))
        for name, want, got in zip(("grad", "jacrev"), *found, strict=True):
            torch.testing.assert_close(got, want, msg=f"{setting}: {name}")
        assert all(p.grad is None for p in model.parameters())
        same_step(plain, model, str(setting))


# -- gradients for parameters --------------------------------------------------------------------
@on_ranks(2)
def test_backward_for_some_inputs(rank: int, world: int) -> None:
    """Sharded parameters, gathered ones, plain leaves and activations, mixed; twice, so that the
    second adds.
    """
    for setting in EVERY:
        plain, model = both(setting, world)
        grads = []
        for m in (plain, model):
            x, factor = batch(plain, 0, 0).requires_grad_(), torch.ones(8, requires_grad=True)
            at_rest = [m.layers[2].weight, m.norm.bias]
            for _ in range(2):
                out = m(x) * factor
                now = [m.layers[0].bias, m.norm.weight]
                loss_of(out).backward(inputs=[factor, *now, x, *at_rest])
            grads.append((x.grad, factor.grad))
        for got, want in zip(*grads, strict=True):
            same(got, want, str(setting))
        assert plain.layers[1].weight.grad is None
        same_gradients(plain, model, str(setting))
        same_step(plain, model, str(setting))


@on_ranks(2)
def test_backward_for_inputs_without_sync(rank: int, world: int) -> None:
    for setting in FEW:
        plain, model = both(setting, world)
        with sw.no_sync(model):
            loss_of(model(batch(plain, 0, 0))).backward(inputs=[model.layers[0].weight])
        loss_of(plain(batch(plain, 0, 0))).backward(inputs=plain.layers[0].weight)
        for m in (plain, model):
            loss_of(m(batch(plain, 1, 0))).backward(inputs=[m.norm.weight, m.layers[0].weight])
        same_gradients(plain, model, str(setting))


@on_ranks(2)
def test_autograd_grad(rank: int, world: int) -> None:
    """For activations and plain leaves as ever; for parameters refused, before anything ran."""
    for setting in EVERY:
        plain, model = both(setting, world)
        found = []
        for m in (plain, model):
            x = batch(plain, 0, 0).requires_grad_()
            found.append(torch.autograd.grad(loss_of(m(x)), [x])[0])
        same(found[1], found[0], str(setting))
        before = list(model.parameters())
        loss = loss_of(model(batch(plain, 0, 0)))
        for params in (before, list(model.parameters()), [model.norm.weight]):
            with pytest.raises(
                NotImplementedError, match=r"autograd\.grad for sharded.*norm\.weig"
            ):
                torch.autograd.grad(loss, params, allow_unused=True, retain_graph=True)
        loss.backward()
        loss_of(plain(batch(plain, 0, 0))).backward()
        same_gradients(plain, model, f"{setting}, the same graph")


@on_ranks(2)
def test_autograd_grad_on_shards(rank: int, world: int) -> None:
    """A loss on the sharded parameters themselves has them in its graph."""
    plain, model = both(Setting("full_shard"), world)
    params, wanted = list(model.parameters()), list(plain.parameters())
    for m, given in ((plain, wanted), (model, params)):
        penalty = sum(p.square().sum() for p in given)
        found = torch.autograd.grad(penalty, given, retain_graph=True)
        for p, grad in zip(given, found, strict=True):
            assert torch.equal(full(grad), 2 * full(p))
        penalty.backward(inputs=given[:2])
        assert m.layers[1].weight.grad is None
    assert torch.equal(full(params[0].grad), full(wanted[0].grad))


class Inner(nn.Module):
    """Takes gradients of its own weight in its forward, as layers that train in the forward do."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x).tanh())
        inner = (x @ self.weight - x.detach()).square().mean() + (x @ self.weight).sin().mean()
        (grad,) = torch.autograd.grad(inner, [self.weight], create_graph=True)
        return x @ (self.weight - 0.1 * grad)


@on_ranks(2)
def test_autograd_grad_inside_of_a_forward(rank: int, world: int) -> None:
    for setting in settings("full_shard", "shard_grad_op"):
        plain, model = both(setting, world, Inner)
        for _ in range(2):
            same_step(plain, model, str(setting))


# -- graphs that enter a unit other than by its outputs ------------------------------------------
class Keeping(nn.Module):
    """A unit of two linear layers that keeps what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = [torch.tanh(self.first(x))]
        return torch.tanh(self.second(self.kept[0]))


class Keepers(nn.Module):
    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Keeping() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


LOSSES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "alone": lambda m, out: loss_of(m.layers[1].kept[0]),
    "first": lambda m, out: loss_of(m.layers[2].kept[0]) + loss_of(out),
    "last": lambda m, out: loss_of(out) + 0.5 * sum(loss_of(b.kept[0]) for b in m.layers),
    "several": lambda m, out: loss_of(m.layers[0].kept[0]) + loss_of(m.layers[2].kept[0]),
}


@on_ranks(2)
def test_losses_on_what_units_keep(rank: int, world: int) -> None:
    for setting in EVERY:
        plain, model = both(setting, world, Keepers)
        for name, loss in LOSSES.items():
            for m in (plain, model):
                m.zero_grad()
                out = m(batch(plain, 0, 0))
                loss(m, out).backward()
            same_gradients(plain, model, f"{setting} {name}")
            same_step(plain, model, f"{setting} {name}")


class Returning(Keepers):
    """Its only output leads into the middle of a unit, past the unit's own output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        return self.layers[1].kept[0] * 2.0


class Skipping(Keepers):
    """A unit takes what another kept, and what that one returned leads nowhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[0](self.embed(x))
        return self.layers[1](self.layers[0].kept[0])


@on_ranks(2)
def test_a_root_that_returns_what_a_unit_kept(rank: int, world: int) -> None:
    for setting in EVERY:
        plain, model = both(setting, world, Returning)
        for m in (plain, model):
            loss_of(m(batch(plain, 0, 0))).backward()
        same_gradients(plain, model, str(setting))


@on_ranks(2)
def test_what_a_unit_kept_as_input_of_another(rank: int, world: int) -> None:
    """The unit is named where it is released before its backward; elsewhere it is right."""
    for setting in EVERY:
        plain, model = both(setting, world, Skipping)
        loss_of(plain(batch(plain, 0, 0))).backward()
        loss = loss_of(model(batch(plain, 0, 0)))
        if model.layers[0]._shardwise_state.unit.copy.is_there:
            loss.backward()
            same_gradients(plain, model, str(setting))
            continue
        with pytest.raises(EngineError, match=r"^unit 'layers\.0': .*kept from inside"):
            loss.backward()
        assert all(type(p) is ShardTensor for p in model.parameters())
        model.zero_grad()
        model.layers[0].set_reshard_after_forward(False)
        loss_of(model(batch(plain, 0, 0))).backward()
        same_gradients(plain, model, f"{setting}, kept")


class StopError(Exception):
    pass


def up_to(model: Any, inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What `inner` returns, in a forward that goes no further."""
    found = []

    def stop(_module: nn.Module, _args: Any, out: torch.Tensor) -> None:
        found.append(out)
        raise StopError

    handle = inner.register_forward_hook(stop)
    with pytest.raises(StopError):
        model(x)
    handle.remove()
    return found[0]


@on_ranks(2)
def test_a_forward_that_an_exception_stopped(rank: int, world: int) -> None:
    for setting in EVERY:
        plain, model = both(setting, world, Keepers)
        for place in (lambda m: m.layers[2], lambda m: m.layers[1].second, lambda m: m.embed):
            for later in (False, True):
                for m in (plain, model):
                    m.zero_grad()
                    x = batch(plain, 0, 0)
                    with torch.no_grad():
                        up_to(m, place(m), x)
                    out = up_to(m, place(m), x)
                    assert m is plain or all(type(p) is ShardTensor for p in m.parameters())
                    whole = loss_of(m(x)) if later else 0.0
                    (loss_of(out) + whole).backward()
                same_gradients(plain, model, f"{setting} {later}")
                same_step(plain, model, str(setting))


# -- exceptions ----------------------------------------------------------------------------------
class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: Any) -> torch.Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.model.fails:
            raise ArithmeticError("boom")
        return grads[0], None


class Fragile(Keepers):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(x))
        return self.layers[2](Boom.apply(self.layers[1](x), self))


def fail(model: Any, where: str) -> None:
    model.fails = True
    x = batch(model, 9, 0)
    if where == "forward":
        with pytest.raises(StopError):
            up_to(model, model.layers[1].second, x)
            raise StopError
    elif where == "no_grad":
        with torch.no_grad():
            up_to(model, model.layers[1].second, x)
    else:
        out = model(x)  # the first node fails, or one in the middle
        with pytest.raises(ArithmeticError, match="boom"):
            loss_of(Boom.apply(out, model) if where == "loss" else out).backward()
    model.fails = False


def load(model: Any, plain: nn.Module, start: Any, tmp: Path) -> None:
    """A rollback to weights from before."""
    model.load_state_dict(start[1])
    plain.load_state_dict(start[0])


def scale(model: Any, plain: nn.Module, start: Any, tmp: Path) -> None:
    with torch.no_grad():
        for p in (*model.parameters(), *plain.parameters()):
            p.mul_(2.0)


def step(model: Any, plain: nn.Module, start: Any, tmp: Path) -> None:
    for m in (model, plain):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for p in m.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()


def save(model: Any, plain: nn.Module, start: Any, tmp: Path) -> None:
    """By every way, and it is what the model has."""
    assert all(type(t) is ShardTensor for t in model.state_dict().values())
    optimizer = torch.optim.AdamW(model.parameters())
    sw.CheckpointManager(tmp / "ours").save(1, model, optimizer)
    torch.save(model.state_dict(), tmp / f"rank{dist.get_rank()}")
    dcp.save(model.state_dict(), checkpoint_id=tmp / "dcp")
    other = Setting("full_shard").shard(make(Fragile, seed=5), 2)
    dcp.load(other.state_dict(), checkpoint_id=tmp / "dcp")
    same_weights(other, dict(plain.named_parameters()), "saved by DCP")


@pytest.mark.parametrize("where", ["backward", "loss", "forward", "no_grad"])
@on_ranks(2, timeout_s=120)
def test_whoever_looks_then_finds_shards(where: str, rank: int, world: int, tmp_path: Path) -> None:
    for i, setting in enumerate(EVERY):
        plain, model = both(setting, world, Fragile)
        start = copy.deepcopy(plain.state_dict()), copy.deepcopy(model.state_dict())
        same_step(plain, model, str(setting))
        for write in (scale, load, step, save):
            if write is save and setting not in FEW:
                continue
            what = f"{setting} {where} {write.__name__}"
            fail(model, where)
            assert all(type(p) is ShardTensor for p in model.parameters()), what
            model.zero_grad()
            write(model, plain, start, tmp_path / str(i))
            same_weights(model, {n: p.detach() for n, p in plain.named_parameters()}, what)
            same_step(plain, model, what)


@on_ranks(2)
def test_another_graph_outlives_an_exception(rank: int, world: int) -> None:
    """What ran before a forward or a backward that failed may still have its own backward."""
    for setting in EVERY:
        for where in ("backward", "loss", "forward"):
            plain, model = both(setting, world, Fragile)
            out = model(batch(plain, 0, 0))
            fail(model, where)
            model.zero_grad()  # a part of the failed backward is in it
            loss_of(out).backward()
            loss_of(plain(batch(plain, 0, 0))).backward()
            same_gradients(plain, model, f"{setting} {where}")
            same_step(plain, model, f"{setting} {where}")


class Catching(Keepers):
    """Goes on with something else where a unit inside fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(x))
        try:
            up_to(self.layers[1], self.layers[1].first, x)
            raise StopError
        except StopError:
            return self.layers[2](x) + self.layers[2](x * 2.0)


@on_ranks(2)
def test_an_exception_that_a_forward_catches(rank: int, world: int) -> None:
    for setting in EVERY:
        plain, model = both(setting, world, Catching)
        for _ in range(2):
            same_step(plain, model, str(setting))
            assert all(type(p) is ShardTensor for p in model.parameters())


@on_ranks(2)
def test_a_forward_that_does_not_begin(rank: int, world: int) -> None:
    """What is found before the first gather leaves nothing open either."""
    for setting in FEW:
        plain, model = both(setting, world)
        same_step(plain, model, str(setting))
        held = model.layers[1]._parameters
        before = held["weight"]
        held["weight"] = nn.Parameter(model.norm.bias.detach().clone())
        with pytest.raises(ValueError, match=r"layers\.1\.weight: replaced by a DTensor"):
            model(batch(plain, 0, 0))
        held["weight"] = before
        same_step(plain, model, str(setting))


# -- swapped -------------------------------------------------------------------------------------
@on_ranks(2)
def test_swap_tensors(rank: int, world: int) -> None:
    """With a tensor of one's own, with another unit's parameter, with one of the same unit."""
    for setting in EVERY:
        plain, model = both(setting, world, Keepers)
        for swap in (
            lambda m: (m.layers[1].first.weight, nn.Parameter(m.embed.weight.detach() * 2.0)),
            lambda m: (m.layers[0].second.bias, m.layers[2].second.bias),
            lambda m: (m.layers[2].first.weight, m.layers[2].second.weight),
        ):
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
            same_step(plain, model, str(setting))
            for m in (plain, model):
                torch.utils.swap_tensors(*swap(m))
            same_step(plain, model, f"{setting} swapped")
            for m, optimizer in zip((plain, model), optimizers, strict=True):
                loss_of(m(batch(plain, 0, 0))).backward()
                optimizer.step()
            same_weights(model, {n: p.detach() for n, p in plain.named_parameters()}, str(setting))
