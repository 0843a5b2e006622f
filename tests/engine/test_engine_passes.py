"""Unusual passes: a unit run twice or not at all, two forwards before a backward, lists, methods.

The gradients are those of the plain model in every case.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import (
    OPTIMIZERS,
    STRATEGIES,
    Mlp,
    Setting,
    Uneven,
    batch,
    line,
    local,
    loss_of,
    make,
    part,
    same_grads,
    same_weights,
    settings,
)

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.services.inspect import gathered_bytes

EVERY = settings(*STRATEGIES, reshard=(False, None))


def equal(model: Any, plain: nn.Module, what: str) -> None:
    same_grads(model, {n: p.grad for n, p in plain.named_parameters()}, what)
    model.zero_grad()
    plain.zero_grad()


def two_forwards(model: Any) -> None:
    (loss_of(model(batch(Mlp, 0, 0))) - 0.5 * loss_of(model(batch(Mlp, 1, 0)))).backward()


def two_backwards(model: Any) -> None:
    first, second = (loss_of(model(batch(Mlp, i, 0))) for i in range(2))
    second.backward()
    first.backward()


def retained(model: Any) -> None:
    loss = loss_of(model(batch(Mlp, 0, 0)))
    loss.backward(retain_graph=True)
    loss.backward()


def input_without_gradient_and_with(model: Any) -> None:
    loss_of(model(batch(Mlp, 0, 0).requires_grad_())).backward()
    loss_of(model(batch(Mlp, 0, 0))).backward()


def inside_no_loss(model: Any) -> None:
    """A forward whose output nobody uses, then a step."""
    model(batch(Mlp, 3, 0))
    loss_of(model(batch(Mlp, 0, 0))).backward()


PASSES: list[Callable[[Any], None]] = [
    two_forwards,
    two_backwards,
    retained,
    input_without_gradient_and_with,
    inside_no_loss,
]


@pytest.mark.parametrize("run", PASSES, ids=lambda f: f.__name__)
@on_ranks(2)
def test_passes(run: Callable[[Any], None], rank: int, world: int) -> None:
    """The same data on both ranks: the mean of two equal gradients is exact."""
    for setting in EVERY:
        plain = make(Mlp)
        model = setting.shard(copy.deepcopy(plain), world)
        for step in range(2):
            run(model)
            run(plain)
            equal(model, plain, f"{setting} step {step}")


class Twice(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[1], self.layers[0]):
            x = torch.tanh(layer(x))
        return self.norm(x)


class Partly(Mlp):
    """Uses two of its three layers, and half of the norm's parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](torch.tanh(self.layers[0](x))) * self.norm.weight


class Nested(Mlp):
    def forward(self, x: Any) -> dict[str, Any]:
        out = super().forward(x["in"][0])
        return {"out": [out, (out * 2, None)], "n": 3}


@on_ranks(2)
def test_units_run_twice_or_never(rank: int, world: int) -> None:
    for setting in EVERY:
        for cls in (Twice, Partly):
            plain = make(cls)
            model = setting.shard(copy.deepcopy(plain), world)
            for step in range(2):
                for m in (model, plain):
                    loss_of(m(batch(m, step, 0))).backward()
                equal(model, plain, f"{setting} {cls.__name__}")


@on_ranks(2)
def test_containers_of_tensors(rank: int, world: int) -> None:
    for setting in EVERY:
        plain = make(Nested)
        model = setting.shard(copy.deepcopy(plain), world)
        for m in (model, plain):
            out = m({"in": (batch(m, 0, 0), None)})["out"]
            (loss_of(out[0]) + loss_of(out[1][0])).backward()
        equal(model, plain, str(setting))


class ChunkedHead(nn.Module):
    """The forward stops before the head; the loss calls it once a chunk."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


@on_ranks(2)
def test_a_list_whose_head_is_called_later_in_chunks(rank: int, world: int) -> None:
    for setting in EVERY:
        plain = make(ChunkedHead)
        model = copy.deepcopy(plain)
        options = setting.options(world)
        sw.fully_shard([model.norm, model.head], **options)
        sw.fully_shard(model, **options)
        for step in range(2):
            for m in (model, plain):
                hidden = m(batch(m, step, 0))
                sum(loss_of(m.head(chunk)) for chunk in hidden.chunk(2)).backward()
            equal(model, plain, f"{setting} step {step}")


class Service(Mlp):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.layers[0](x)))


@on_ranks(2)
def test_a_registered_method(rank: int, world: int) -> None:
    for setting in EVERY:
        plain = make(Service)
        model = setting.shard(copy.deepcopy(plain), world)
        sw.register_fsdp_forward_method(model, "encode")
        for m in (model, plain):
            loss_of(m.encode(batch(m, 0, 0))).backward()
            loss_of(m(batch(m, 0, 0))).backward()
        equal(model, plain, str(setting))


@on_ranks(2)
def test_unshard_by_hand(rank: int, world: int) -> None:
    for setting in settings("full_shard", "shard_grad_op"):
        plain = make(Mlp)
        model = setting.shard(copy.deepcopy(plain), world)
        handle = model.layers[0].unshard(async_op=True)
        handle.wait()
        handle.wait()
        weight = model.layers[0].weight
        assert type(weight) is nn.Parameter and torch.equal(weight, plain.layers[0].weight)
        model.layers[0].reshard()
        assert model.layers[0].weight.placements and gathered_bytes(model) == 0
        for m in (model, plain):
            loss_of(m(batch(m, 0, 0))).backward()
        equal(model, plain, str(setting))


def step_now(name: str, opts: dict[str, Any], fired: list[str], _: torch.Tensor) -> None:
    fired.append(name)
    opts[name].step()
    opts[name].zero_grad()


@on_ranks(2)
def test_hooks_of_parameters_fire_once(rank: int, world: int) -> None:
    """An optimizer step inside a post-accumulate hook equals a normal one bit for bit."""
    for setting in settings(*STRATEGIES):
        models = [setting.shard(make(Mlp), world) for _ in range(2)]
        fired: list[str] = []
        inside = {}
        for name, p in models[0].named_parameters():
            inside[name] = OPTIMIZERS["adamw"]([p])

            p.register_post_accumulate_grad_hook(functools.partial(step_now, name, inside, fired))
        opt = OPTIMIZERS["adamw"](models[1].parameters())
        for step in range(2):
            fired.clear()
            for m in models:
                loss_of(m(batch(m, step, rank))).backward()
            assert sorted(fired) == sorted(inside), str(setting)
            opt.step()
            opt.zero_grad()
        weights = dict(models[1].named_parameters())
        for name, p in models[0].named_parameters():
            assert torch.equal(local(p), local(weights[name])), f"{setting} {name}"


@on_ranks(2)
def test_branches_that_differ_between_ranks(rank: int, world: int) -> None:
    """Shared memory takes them: a rank without a part in a unit joins its reduction."""
    for strategy in ("full_shard", "shard_grad_op"):
        plain = make(Mlp)
        model = Setting(strategy, "shared_memory").shard(copy.deepcopy(plain), world)

        def run(m: Any, branch: int) -> None:
            loss_of(m.norm(m.layers[branch](batch(m, 0, branch)))).backward()

        model.forward = lambda x, m=model: m.norm(m.layers[rank](x))
        loss_of(model(batch(model, 0, rank))).backward()
        for branch in range(world):
            run(plain, branch)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None, name
            else:
                assert torch.equal(local(p.grad), part(q.grad / 2, p)), f"{strategy} {name}"


@on_ranks(2)
def test_weights_that_differ_between_ranks_become_those_of_one(rank: int, world: int) -> None:
    for setting in settings("full_shard", "no_shard"):
        model = setting.shard(make(Uneven, seed=rank), world)
        plain = dict(make(Uneven, seed=0).named_parameters())
        same_weights(model, {n: p.detach() for n, p in plain.items()}, str(setting))


@on_ranks(2)
def test_a_deep_copy_trains_on_its_own(rank: int, world: int) -> None:
    for setting in EVERY:
        plain = make(Mlp)
        model = setting.shard(copy.deepcopy(plain), world)
        loss_of(model(batch(Mlp, 0, 0))).backward()
        model.zero_grad()
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2.0)
        for step in range(2):
            for m in (copied, plain):
                loss_of(m(batch(Mlp, step, 0))).backward()
                torch.optim.SGD(m.parameters(), lr=0.1).step()
            equal(copied, plain, f"{setting} step {step}")
        assert all(p.grad is None for p in model.parameters())


@on_ranks(2)
def test_what_cannot_be_is_refused(rank: int, world: int) -> None:
    mesh = line(world)
    model = sw.fully_shard(make(Mlp), mesh=mesh)
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        sw.fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="both say how long"):
        sw.fully_shard(make(Mlp), mesh=mesh, strategy="no_shard", reshard_after_forward=True)
    with pytest.raises(ValueError, match="2 dims"):
        sw.fully_shard(make(Mlp), mesh=mesh, strategy="hybrid_shard")
    with pytest.raises(ValueError, match="did you mean"):
        sw.fully_shard(make(Mlp), mesh=mesh, transport="shared_memroy")
