"""Modules that keep their own parameters in other places than `_parameters`."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import deque, namedtuple
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from engine_kit import STRATEGIES, Plain, Setting, batch, full, loss_of, make, settings

import shardwise as sw
from ranks import on_ranks
from shardwise.errors import EngineError

WAYS = [*settings(*STRATEGIES), Setting(None, "c10d", False), Setting(None, "shared_memory", 2)]

Pair = namedtuple("Pair", "weight bias")


@dataclasses.dataclass
class Record:
    """A record of parameters."""

    weight: Any
    bias: Any = None


class Keeper(nn.Module):
    """Computes with what it keeps, never with its attributes `weight` and `bias`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8) * 0.4), nn.Parameter(torch.zeros(8))
        self.kind = kind
        self.keep()

    def keep(self) -> None:
        w, b = self.weight, self.bias
        kept: Any = {
            "list": [w, b],
            "tuple": (w, b),
            "dict": {"w": w, "b": b},
            "nested": [{"w": (w,)}, {"b": [b]}],
            "namedtuple": Pair(w, b),
            "record": Record(w, b),
            "namespace": types.SimpleNamespace(weight=w, bias=b),
            "deque": deque([w, b]),
            "long": [w, b] * 50,
        }.get(self.kind)
        self.kept = kept
        if self.kind == "attribute":
            self.__dict__["own_w"], self.__dict__["own_b"] = w, b

    def found(self) -> tuple[torch.Tensor, torch.Tensor]:
        k: Any = self.kept
        if self.kind in ("namedtuple", "record", "namespace"):
            return k.weight, k.bias
        if self.kind == "dict":
            return k["w"], k["b"]
        if self.kind == "nested":
            return k[0]["w"][0], k[1]["b"][0]
        if self.kind == "attribute":
            return self.own_w, self.own_b
        return k[0], k[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, *self.found())


KINDS = "list tuple dict nested namedtuple record namespace deque long attribute".split()


def net(kind: str, *, own: bool = True) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Keeper(kind), nn.Tanh(), Keeper(kind))
    model.layers = [model[0]] if own else []  # a unit of its own, the other in the root's
    return model


def train(model: Any, oracle: Plain, rank: int, num: int = 3, first: int = 0) -> None:
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model)]
    for step in range(first, first + num):
        loss_of(model(batch(model, step, rank))).backward()
        oracle.step(step)
        for (n, p), q in zip(model.named_parameters(), oracle.model.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=n)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        with torch.no_grad():  # an evaluation between
            x = batch(model, 50, rank)
            torch.testing.assert_close(model(x), oracle.model(x), rtol=1e-5, atol=1e-6)


def check_forms(model: Any) -> None:
    """At rest what is kept is what is registered."""
    for module in model.modules():
        if isinstance(module, Keeper):
            assert module.found()[0] is module.weight and module.found()[1] is module.bias


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_kept_in(kind: str, rank: int, world: int) -> None:
    for own in (True, False):
        oracle = Plain(net(kind), world)
        model = Setting("full_shard", "shared_memory").shard(net(kind, own=own), world)
        check_forms(model)
        train(model, oracle, rank)
        check_forms(model)
        copied = copy.deepcopy(model)
        train(copied, oracle, rank, num=1, first=3)
        check_forms(copied)


@pytest.mark.parametrize("setting", WAYS, ids=str)
@on_ranks(4)
def test_under(setting: Setting, rank: int, world: int) -> None:
    oracle = Plain(net("nested"), world)
    train(setting.shard(net("nested"), world), oracle, rank)


@pytest.mark.parametrize("setting", WAYS, ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@on_ranks(2)
def test_recurrent(kind: str, setting: Setting, rank: int, world: int) -> None:
    class Model(nn.Module):
        features = 8

        def __init__(self) -> None:
            super().__init__()
            self.rnn = getattr(nn, kind)(4, 3, 2, batch_first=True, bidirectional=True)
            self.inner = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
            self.layers = [self.rnn, self.inner] if setting.strategy != "shard_grad_op" else []
            self.cell = nn.LSTMCell(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cell(self.inner(self.rnn(x.view(-1, 2, 4))[0]).sum(1))[0]

    oracle = Plain(make(Model), world)
    model = setting.shard(make(Model), world)
    train(model, oracle, rank)
    model.float()
    train(model, oracle, rank, num=1, first=3)


@on_ranks(2)
def test_kept_again_at_rest_and_in_a_forward(rank: int, world: int) -> None:
    """Places that are filled after sharding follow too, under names known before or new."""
    oracle = Plain(net("list"), world)
    model = Setting("full_shard", "c10d").shard(net("list"), world)
    train(model, oracle, rank, num=1)
    for keeper in (model[0], model[2]):
        keeper.keep()  # shards now
    train(model, oracle, rank, num=1, first=1)
    for keeper in (model[0], model[2]):
        keeper.register_forward_pre_hook(lambda m, _: m.keep())
        keeper.kind = "dict"
    train(model, oracle, rank, num=2, first=2)
    check_forms(model)


@on_ranks(2)
def test_a_parent_keeps_those_of_its_children(rank: int, world: int) -> None:
    """What a list above shows is what the children's own slots show."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.matrices = [m.weight for m in model]
    sw.fully_shard(model[0])
    sw.fully_shard(model)
    for _ in range(2):
        assert all(a is m.weight for a, m in zip(model.matrices, model, strict=True))
        model(torch.ones(2, 4)).sum().backward()
        opt = torch.optim.SGD(model.matrices, lr=0.1)
        before = full(model[0].weight)
        opt.step()
        assert not torch.equal(before, full(model[0].weight))


@on_ranks(2)
def test_a_view_is_still_named(rank: int, world: int) -> None:
    class Cache(nn.Linear):
        """Keeps a row of its weight."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = [self.weight, self.weight[:1]]
            return super().forward(x)

    model = nn.Sequential(Cache(4, 4), nn.Linear(4, 4))
    sw.fully_shard(model[0])
    sw.fully_shard(model)
    with pytest.raises(EngineError, match=r"0\.cache: is a view of the gathered parameters"):
        model(torch.ones(2, 4))
