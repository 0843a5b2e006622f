"""Copies that are kept, by strategy or by wish, serve forwards without gradients by themselves."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import TRANSPORTS, Branches, full, grid, line, units_of

import shardwise as sw
from ranks import on_ranks, spawn_ranks
from shardwise.engine.state import unit_of, units_in
from shardwise.errors import DivergenceError

KEPT = (
    "shard_grad_op",
    "shard_optimizer",
    "no_shard",
    "reshard_after_forward=False",
    "set_reshard_after_forward",
    "unshard",
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.fails:
            raise ArithmeticError("on this rank")
        return x * self.scale


def sharded(plain: nn.Module, how: str, **options: Any) -> Any:
    model: Any = copy.deepcopy(plain)
    if "=" in how:
        options["reshard_after_forward"] = False
    elif how in ("shard_grad_op", "shard_optimizer", "no_shard"):
        options["strategy"] = how
    for layer in model.layers:
        sw.fully_shard(layer, **options)
    sw.fully_shard(model, **options)
    if how.startswith("set_"):
        model.set_reshard_after_forward(False)
    return model


def ask_to_keep(model: Any, how: str) -> None:
    for module in model.modules() if how == "unshard" else ():
        if isinstance(module, sw.FSDPModule):
            module.unshard()


def generate(model: Any, plain: nn.Module, num: int, *, inference: bool = False) -> None:
    x = torch.full((2, 8), 0.3)
    y = x.clone()
    with torch.inference_mode() if inference else torch.no_grad():
        for _ in range(num):
            x, y = model(x), plain(y)
            torch.testing.assert_close(x, y)  # of 4 ranks the order of sums differs


def train(models: tuple[Any, ...], optimizers: tuple[Any, ...], rank: int, world: int) -> None:
    for model, optimizer in zip(models, optimizers, strict=True):
        ranks = (rank,) if isinstance(model, sw.FSDPModule) else range(world)
        losses = [model(torch.full((2, 8), 0.1 * (r + 1))).sum() for r in ranks]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def alike(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q.detach()), p.detach(), msg=name)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", KEPT)
@on_ranks(2)
def test_ranks_generate_unequal_lengths(rank: int, world: int, how: str, transport: str) -> None:
    """Then train a step, which is that of the plain model, and generate again."""
    torch.manual_seed(0)
    plain = Net()
    model = sharded(plain, how, mesh=line(world), transport=transport)
    optimizers = tuple(torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for lengths in ((6, 3), (1, 9), (2, 2)):
        ask_to_keep(model, how)
        generate(model, plain, lengths[rank], inference=rank == 1)
        for unit in units_in(model):
            assert unit.is_held, "kept"
        train((model, plain), optimizers, rank, world)
        alike(model, plain)
        with torch.no_grad():
            for m in (model, plain):
                for p in m.parameters():
                    p.mul_(0.9)


@pytest.mark.parametrize("how", KEPT)
@on_ranks(2)
def test_ranks_that_run_different_units_generate(rank: int, world: int, how: str) -> None:
    """A copy that a rank did not use is as current as the one that its peer did."""
    torch.manual_seed(0)
    plain = Branches()
    model = sharded(plain, how, mesh=line(world), transport="shared_memory")
    optimizers = tuple(torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    routes = ((0, 1), (0, 1, 2))
    x = torch.full((2, 8), 0.3)
    for num in (2, 0, 5):
        ask_to_keep(model, how)
        losses = [plain(x, *route).sum() for route in routes]
        own = model(x, *routes[rank]).sum()
        with torch.no_grad():  # between a forward and its backward
            torch.testing.assert_close(model(x, *routes[rank]), plain(x, *routes[rank]))
        torch.stack(losses).mean().backward()
        own.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        alike(model, plain)
        ask_to_keep(model, how)
        with torch.no_grad():
            for _ in range(1 + num * rank):
                torch.testing.assert_close(model(x, *routes[rank]), plain(x, *routes[rank]))


@on_ranks(2)
def test_a_forward_that_released_on_one_rank_what_was_unsharded(rank: int, world: int) -> None:
    """Whether a copy serves a forward alone is said by what all ranks know, not by who has one."""
    torch.manual_seed(0)
    plain = Branches()
    model: Any = copy.deepcopy(plain)
    options = {"mesh": line(world), "transport": "shared_memory"}
    for i, layer in enumerate(model.layers):
        sw.fully_shard(layer, strategy="full_shard" if i == 2 else "shard_grad_op", **options)
    sw.fully_shard(model, strategy="shard_grad_op", **options)
    routes = ((0, 1), (0, 1, 2))
    x = torch.full((2, 8), 0.3)
    for _ in range(2):
        model.layers[2].unshard()
        losses = [plain(x, *route).sum() for route in routes]
        own = model(x, *routes[rank]).sum()
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(model(x, *routes[rank]), plain(x, *routes[rank]))
        torch.stack(losses).mean().backward()
        own.backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(q.grad), p.grad, msg=name)
        model.layers[2].unshard()
        with torch.no_grad():  # wished anew, on all ranks
            for _ in range(1 + 3 * rank):
                torch.testing.assert_close(model(x, 2, 0), plain(x, 2, 0))


@pytest.mark.parametrize("how", KEPT)
@on_ranks(2)
def test_a_forward_that_failed_early_on_one_rank(rank: int, world: int, how: str) -> None:
    """The other had gathered all copies by then; both gather before the next evaluation."""
    torch.manual_seed(0)
    plain = Branches()
    model = sharded(plain, how, mesh=line(world), transport="shared_memory")
    x = torch.full((2, 8), 0.3)
    for has_grad in (True, False):
        with torch.no_grad():
            for p in (*plain.parameters(), *model.parameters()):
                p.mul_(0.9)
        ask_to_keep(model, how)
        route = (0, 1, 2) if rank else (0, 99)
        with torch.set_grad_enabled(has_grad), contextlib.suppress(IndexError, RuntimeError):
            model(x, *route)  # without gradients it may be served alone, and succeed
        for num in (1, 1 + 2 * rank):
            with torch.no_grad():
                for _ in range(num):
                    torch.testing.assert_close(model(x, 0, 1, 2), plain(x, 0, 1, 2))
            ask_to_keep(model, how)
        for module in units_of(model) if how == "unshard" else ():
            module.reshard()  # what follows writes to shards


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_unit_that_nothing_runs_keeps_nobody_from_it(
    rank: int, world: int, transport: str
) -> None:
    torch.manual_seed(0)
    plain = Branches()
    model = sharded(plain, "shard_grad_op", mesh=line(world), transport=transport)
    x = torch.full((2, 8), 0.3)
    with torch.no_grad():
        for _ in range(2 + 3 * rank):
            torch.testing.assert_close(model(x, 0, 2), plain(x, 0, 2))


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(4)
def test_one_rank_evaluates_alone_between_steps(rank: int, world: int, transport: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    model = sharded(plain, "shard_grad_op", mesh=grid(2, 2), transport=transport)
    optimizers = tuple(torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for step in range(3):
        generate(model, plain, 1)  # gathers what the step has written
        if rank == step:
            generate(model, plain, 4)
            model.fails = True
            with torch.no_grad(), pytest.raises(ArithmeticError):
                model(torch.ones(2, 8))
            model.fails = False
            generate(model, plain, 1)
        train((model, plain), optimizers, rank, world)
        alike(model, plain)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("how", ["shard_grad_op", "reshard_after_forward=False"])
def test_a_rank_that_alone_has_written_is_named(how: str, transport: str) -> None:
    """It gathers before its forward without gradients; the other goes on by itself. On ranks of
    its own: on c10d a collective stays without its partner.
    """
    with spawn_ranks(2, write_on_one, how, transport) as group:
        outcomes = group.join(timeout_s=40)
    assert [o.kind for o in outcomes] == ["ok", "ok"], outcomes
    assert all("has written" in o.value for o in outcomes), outcomes


def write_on_one(rank: int, world: int, how: str, transport: str) -> str:
    sw.set_wait_limit(15)
    model = sharded(Net(), how, mesh=line(world), transport=transport)
    with torch.no_grad():
        model(torch.ones(2, 8))
        for p in model.parameters() if rank == 1 else ():
            p.mul_(2.0)
    with pytest.raises(DivergenceError) as info:
        with torch.no_grad():
            model(torch.ones(2, 8))
        model(torch.ones(2, 8)).sum().backward()
    return str(info.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_copies_go_when_nobody_asks_for_them_any_more(
    rank: int, world: int, transport: str
) -> None:
    """`reshard`, a backward, and what was never asked for: `reshard_after_forward=None`."""
    plain = Net()
    model = sharded(plain, "unshard", mesh=line(world), transport=transport)
    units = units_in(model)
    generate(model, plain, 1)
    assert not any(u.is_held for u in units if u.transports), "also the root's own"
    layer = model.layers[1]
    layer.unshard()
    generate(model, plain, 2)
    assert unit_of(layer).is_held and layer.weight.shape == (8, 8)
    layer.reshard()
    generate(model, plain, 1)
    assert not unit_of(layer).is_held
    layer.unshard()
    model(torch.ones(2, 8)).sum().backward()
    assert not unit_of(layer).is_held
    generate(model, plain, 1)
    assert not unit_of(layer).is_held
