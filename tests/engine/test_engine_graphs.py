"""Graphs that are used in other ways than forward, backward, gone: outputs written over, graphs
kept for another backward, tied parameters under way in two units, models deleted in between.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import Mlp, Setting, batch, loss_of, make, same_grads
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from ranks import on_ranks


def agree(plain: Any, model: Any, run: Callable[[Any], None], what: str) -> None:
    """Both have the same gradients after `run`; all ranks have the same data."""
    run(plain)
    run(model)
    same_grads(model, {n: p.grad for n, p in plain.named_parameters()}, what)


# -- outputs -------------------------------------------------------------------------------------
class Residual(nn.Module):
    """Writes to what its layers return, as `h += x` does."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (2, -1))
        for layer in self.layers:
            hidden = layer(torch.tanh(x))
            assert hidden._is_view()  # what makes this test one
            hidden += x
            x = hidden
        return x.flatten(0, 1)


@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@on_ranks(2)
def test_outputs_that_are_views_and_written_to(transport: str, rank: int, world: int) -> None:
    """Writing to a view gives it a history anew, in which a hook on the view itself is not."""
    plain = make(Residual)
    model = Setting("full_shard", transport).shard(copy.deepcopy(plain), world)
    agree(plain, model, lambda m: loss_of(m(batch(Residual, 0, 0))).backward(), "residual")


class Marked(nn.Module):
    """Writes to a part of what layers return, before others see it, inside a unit and between."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([First(), nn.Sequential(nn.Linear(8, 8), nn.Tanh())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x.unflatten(0, (2, -1)))
        x[:, :, 0] = 1.0
        return checkpoint(self.layers[1], x, use_reentrant=False)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        hidden[:, 0] = 0.0
        return hidden


@on_ranks(2)
def test_views_of_which_a_part_is_written(rank: int, world: int) -> None:
    """A hook on such a view ends the process with a segmentation fault, as of torch 2.13."""
    plain = make(Marked)
    model = Setting("full_shard").shard(copy.deepcopy(plain), world)
    agree(plain, model, lambda m: loss_of(m(batch(Marked, 0, 0))).backward(), "marked")


# -- another backward ----------------------------------------------------------------------------
class Recurrent(nn.Module):
    """One unit after itself, its output in a dict, so that each call has hooks of its own."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Cell()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.layers[0](x)["hidden"]
        return x


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": torch.tanh(self.linear(x))}


@on_ranks(2)
def test_a_graph_is_used_again(rank: int, world: int) -> None:
    """Each backward through a unit that is called several times releases it behind the last call
    only.
    """
    plain = make(Recurrent)
    model = Setting("full_shard").shard(copy.deepcopy(plain), world)

    def twice(m: Any) -> None:
        loss = loss_of(m(batch(Recurrent, 0, 0).requires_grad_(True)))
        loss.backward(retain_graph=True)
        loss.backward()

    agree(plain, model, twice, "twice")


# -- tied parameters -----------------------------------------------------------------------------
class Tied(nn.Module):
    """The root uses a layer's weight before the layer and after it."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 8)
        self.head.weight = self.layers[1].weight
        self.layers[0].weight = self.layers[2].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.head(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def shard_tied(plain: nn.Module, order: tuple[int, ...], world: int) -> Any:
    model: Any = copy.deepcopy(plain)
    options = Setting("full_shard").options(world)
    for i in order:
        sw.fully_shard(model.layers[i], **options)
    return sw.fully_shard(model, **options)


@on_ranks(2)
def test_a_tied_parameter_is_still_used_elsewhere(rank: int, world: int) -> None:
    """The backward is through with the unit that owns it, not with the one around."""
    plain = make(Tied)
    model = shard_tied(plain, (0, 1, 2), world)
    x = batch(Tied, 0, 0).requires_grad_(True)
    (want,) = torch.autograd.grad(loss_of(plain(x)), [x])
    (got,) = torch.autograd.grad(loss_of(model(x)), [x])
    assert torch.equal(got, want)
    agree(plain, model, lambda m: loss_of(m(x)).backward(), "tied")


@on_ranks(2)
def test_copies_of_tied_units(rank: int, world: int) -> None:
    """Whichever unit was sharded first, the copy's units are tied to each other."""
    plain = make(Tied)
    for order in (0, 1, 2), (2, 1, 0):
        model = shard_tied(plain, order, world)
        twin = copy.deepcopy(model)
        source = {module._shardwise_state.unit for module in (model, *model.layers)}
        for one, other in zip((model, *model.layers), (twin, *twin.layers), strict=True):
            unit, copied = one._shardwise_state.unit, other._shardwise_state.unit
            assert copied.is_tied == unit.is_tied and not source & set(copied._tied_to)
        plain.zero_grad()
        agree(plain, twin, lambda m: loss_of(m(batch(Tied, 0, 0))).backward(), f"{order}")


# -- deleting ------------------------------------------------------------------------------------
def forward_only(model: Any, x: torch.Tensor) -> None:
    model(x)


def without_sync(model: Any, x: torch.Tensor) -> None:
    with sw.no_sync(model):
        loss_of(model(x)).backward()


def checkpointed(model: Any, x: torch.Tensor) -> None:
    loss_of(checkpoint(model, x, use_reentrant=False)).backward()


def checkpointed_inside(model: Any, x: torch.Tensor) -> None:
    x = checkpoint(model.layers[0], x.requires_grad_(True), use_reentrant=True)
    loss_of(x).backward()


def from_a_leaf(model: Any, x: torch.Tensor) -> None:
    """The caller keeps `x`."""
    loss_of(model(x.requires_grad_(True))).backward()


def forward_from_a_leaf(model: Any, x: torch.Tensor) -> None:
    model(x.requires_grad_(True))


USES = (
    forward_only,
    forward_from_a_leaf,
    without_sync,
    checkpointed,
    checkpointed_inside,
    from_a_leaf,
)


@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
@on_ranks(2)
def test_a_deleted_model_is_gone_at_once(use: Any, rank: int, world: int) -> None:
    """Without the garbage collector, which comes when it likes."""
    model = Setting("full_shard").shard(make(Mlp), world)
    units = [weakref.ref(m._shardwise_state.unit) for m in (model, *model.layers)]
    x = batch(Mlp, 0, rank)
    gc.collect()
    gc.disable()
    try:
        use(model, x)
        del model
        assert [ref() for ref in units] == [None] * len(units)
    finally:
        gc.enable()


@on_ranks(2)
def test_a_model_whose_backward_failed_can_be_deleted(rank: int, world: int) -> None:
    """As one does after running out of memory. The failed backward is a cycle, held by nobody."""
    model = Setting("full_shard").shard(make(Mlp), world)
    units = [weakref.ref(m._shardwise_state.unit) for m in (model, *model.layers)]
    x = batch(Mlp, 0, rank).requires_grad_(True)

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("on purpose")

    x.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model(x)).backward()
    del model
    gc.collect()
    assert [ref() for ref in units] == [None] * len(units)


@on_ranks(2)
def test_a_leaf_keeps_no_hooks(rank: int, world: int) -> None:
    """An input that is optimised itself sees many steps."""
    model = Setting("full_shard").shard(make(Mlp), world)
    x = batch(Mlp, 0, rank).requires_grad_(True)
    for _ in range(3):
        model(x)  # and not all of them have a backward
        loss_of(model(x)).backward()
        assert not x._backward_hooks


@on_ranks(2)
def test_a_loss_outlives_its_model(rank: int, world: int) -> None:
    """What is still to come needs the units, not the modules."""
    plain = make(Mlp)
    model = Setting("full_shard").shard(copy.deepcopy(plain), world)
    x, y = (batch(Mlp, 0, 0).requires_grad_(True) for _ in range(2))
    loss = loss_of(model(x))
    del model
    loss.backward()
    loss_of(plain(y)).backward()
    assert x.grad is not None and torch.equal(x.grad, y.grad)
