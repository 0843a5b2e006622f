"""Views of gathered parameters that user code keeps: right, or an error that names them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import TRANSPORTS, line, loss_of

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.core.state import units_in
from shardwise.engine.services.inspect import gathered_bytes
from shardwise.errors import EngineError

SIZE = 64


class Keeps(nn.Module):
    """Keeps something of its weight where it is told to."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.keep = keep
        self.cache: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keep(self, self.weight)
        return torch.tanh(x @ self.weight.t())


def in_list(kept: list[Any], view: Any) -> Any:
    return lambda _, weight: kept.append(view(weight))


def in_attribute(view: Any, name: str = "cache") -> Any:
    return lambda module, weight: setattr(module, name, view(weight))


def build(keep: Any, world: int, transport: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Keeps(keep), nn.Linear(SIZE, SIZE))
    for layer in model:
        sw.fully_shard(layer, mesh=line(world), transport=transport, **options)
    return sw.fully_shard(model, mesh=line(world), transport=transport, **options)


VIEWS = {
    "slice": lambda w: w[:2],
    "detached": lambda w: w.detach()[:2],
    "transposed": lambda w: w.t(),
    "list": lambda w: [w[:1], w[1:2]],
    "dict": lambda w: {"rows": w[:2]},
}


@pytest.mark.parametrize("name", ["cache", "added_later"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_an_attribute_is_named(transport: str, view: str, name: str, rank: int, world: int) -> None:
    keep = in_attribute(VIEWS[view], name)
    model = build(keep, world, transport)
    for grad in (True, False):
        text = rf"0\.{name}: is a view .*'0'.*clone"
        with torch.set_grad_enabled(grad), pytest.raises(EngineError, match=text):
            model(torch.ones(2, SIZE))
    model[0].keep = in_attribute(lambda w: w[:2].clone())
    setattr(model[0], name, None)
    loss_of(model(torch.ones(2, SIZE))).backward()  # goes on
    assert gathered_bytes(model) == 0
    for options in ({"strategy": "shard_grad_op"}, {"reshard_after_forward": False}):
        kept = build(keep, world, transport, **options)
        out = kept(torch.ones(2, SIZE))
        if view == "slice":
            assert torch.equal(getattr(kept[0], name), model[0].weight.full_tensor()[:2])
        loss_of(out).backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_elsewhere_it_stays_readable(transport: str, rank: int, world: int) -> None:
    """Behind a backward, and behind a forward without grad."""
    for view in (VIEWS["slice"], VIEWS["detached"], lambda w: w.detach().numpy()[:2]):
        kept: list[Any] = []
        model = build(in_list(kept, view), world, transport)
        expected = model[0].weight.full_tensor()[:2]
        with torch.no_grad():
            first = model(torch.ones(2, SIZE)).clone()
        for _ in range(3):
            loss_of(model(torch.ones(2, SIZE))).backward()
        with torch.no_grad():
            again = model(torch.ones(2, SIZE))
        assert torch.equal(first, again)
        assert len(kept) == 5
        for seen in kept:
            assert torch.equal(torch.as_tensor(seen).detach(), expected)
        assert gathered_bytes(model) == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_thread_that_lets_go_late_hides_no_view(transport: str, rank: int, world: int) -> None:
    """Gloo's threads hold views of what they gathered for a moment after it is there."""
    kept: list[Any] = []
    model = build(in_list(kept, VIEWS["slice"]), world, transport)
    (bucket,) = next(unit for unit in units_in(model) if unit.buckets).buckets
    count = bucket.count_uses_behind_gather

    def count_beside_a_thread() -> None:
        views = bucket.out.chunk(world)
        count()
        del views

    bucket.count_uses_behind_gather = count_beside_a_thread
    for _ in range(3):  # its first gathers, and the first behind which a view was kept
        with torch.no_grad():
            model(torch.ones(2, SIZE))
        assert kept[-1].untyped_storage().nbytes(), "the memory of a kept view was taken"
    assert gathered_bytes(model) == 0


@on_ranks(2)
def test_retained_graphs_keep_no_memory(rank: int, world: int) -> None:
    """What autograd holds of a graph that is kept is released all the same."""
    model = build(lambda *_: None, world, "c10d")
    loss = loss_of(model(torch.ones(2, SIZE)))
    storages = [b.storage for u in units_in(model) for b in u.buckets]
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert [b.storage for u in units_in(model) for b in u.buckets] == storages
        assert all(s.nbytes() == 0 for s in storages)


@on_ranks(2)
def test_the_usual_step_leaves_nothing(rank: int, world: int) -> None:
    """The same storages over many steps, evaluation between them."""
    for transport in TRANSPORTS:
        model = build(lambda *_: None, world, transport)
        loss_of(model(torch.ones(2, SIZE))).backward()
        storages = [b.storage for u in units_in(model) for b in u.buckets]
        for _ in range(3):
            loss_of(model(torch.ones(2, SIZE))).backward()
            with torch.no_grad():
                model(torch.ones(2, SIZE))
            gc.collect()
        assert all(
            b.storage is s
            for b, s in zip((b for u in units_in(model) for b in u.buckets), storages, strict=True)
        )
