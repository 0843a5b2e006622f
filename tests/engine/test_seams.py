"""The seams of the kernel, used from outside: nothing here is known to `src/`, and all of it trains
like a plain model.

    guard, service   listen to moments                        core/moments.py
    hold             keeps a gathered copy                    core/copy.py
    route            takes gradients its own way              core/gradients.py
    store            keeps optimizer state elsewhere          torch's own hooks; shards are tensors
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import Mlp, Plain, Setting, batch, full, loss_of, make, settings

from ranks import on_ranks
from shardwise.engine.core import moments
from shardwise.engine.core.backward import BackwardPass
from shardwise.engine.core.context import Context
from shardwise.engine.core.copy import OTHERS
from shardwise.engine.core.gradients import USUAL, BucketGrads, Gradients, Route, Taken
from shardwise.engine.core.state import unit_of, units_in
from shardwise.engine.core.unit import Unit

EVERY = settings("full_shard", "shard_grad_op", "no_shard", reshard=(False,))


def close(model: Any, plain: torch.nn.Module, what: str) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(p), q.detach()), f"{what}: {name}"


# -- a guard ---------------------------------------------------------------------------------------
class NoGradientIsZero:
    """Complains of units whose gradients are all zero: a dead branch, a masked loss."""

    def ended(self, backward: BackwardPass) -> None:
        for unit in backward.touched:
            grads = [p.sharded.grad for p in unit.params if p.sharded.grad is not None]
            if grads and not any(full(g).any() for g in grads):
                raise RuntimeError(f"{unit.name}: all gradients are zero")


@on_ranks(2)
def test_a_guard(rank: int, world: int) -> None:
    for setting in EVERY:
        plain = Plain(make(Mlp), world)
        model = setting.shard(make(Mlp), world)
        model(batch(Mlp, 0, rank))  # the context of the whole is made here
        unit_of(model).context.moments.add(NoGradientIsZero())
        plain.step(0)
        loss_of(model(batch(Mlp, 0, rank))).backward()
        for name, p in model.named_parameters():
            assert torch.equal(full(p.grad), plain.grads()[name]), f"{setting} {name}"
        model.zero_grad()
        with pytest.raises(RuntimeError, match="all gradients are zero"):
            (loss_of(model(batch(Mlp, 0, rank))) * 0.0).backward()
        model.zero_grad()
        loss_of(model(batch(Mlp, 0, rank))).backward()  # nobody is left waiting


# -- a service -------------------------------------------------------------------------------------
class Average:
    """Keeps a running average of the shards: brought up to date when a pass begins."""

    def __init__(self) -> None:
        self.of: dict[torch.Tensor, torch.Tensor] = {}

    def before_forward(self, context: Context) -> None:
        with torch.no_grad():
            for p in (param.sharded for unit in context.units for param in unit.params):
                known = self.of.setdefault(p, p.detach().clone())
                known.mul_(0.5).add_(p.detach(), alpha=0.5)


class Counts:
    """A second one, which every context has from its beginning."""

    num_gathers = num_contexts = 0

    def __init__(self) -> None:
        Counts.num_contexts += 1

    def gathering(self, _unit: Unit) -> None:
        Counts.num_gathers += 1


@on_ranks(2)
def test_services(rank: int, world: int) -> None:
    known = list(moments._makers)
    moments.register(Counts)
    try:
        for setting in EVERY:
            train_with_an_average(setting, rank, world)
    finally:
        moments._makers[:] = known
    assert Counts.num_contexts
    assert Counts.num_gathers


def train_with_an_average(setting: Setting, rank: int, world: int) -> None:
    plain, average = Plain(make(Mlp), world), Average()
    averages = {name: p.clone() for name, p in plain.weights().items()}
    model = setting.shard(make(Mlp), world)
    unit_of(model).context.moments.add(average)  # goes along to the context of the whole
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain.model)]
    for step in range(3):
        for name, p in plain.weights().items():
            averages[name].mul_(0.5).add_(p, alpha=0.5)
        loss_of(model(batch(Mlp, step, rank))).backward()
        plain.step(step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    close(model, plain.model, str(setting))
    for name, p in model.named_parameters():
        assert torch.equal(full(average.of[p]), averages[name]), f"{setting} {name}"


# -- a hold ----------------------------------------------------------------------------------------
@on_ranks(2)
def test_a_hold_from_outside(rank: int, world: int) -> None:
    """A copy stays as long as somebody holds it, is gathered anew after a write, and then goes."""
    for setting in settings("full_shard"):
        plain = Plain(make(Mlp), world)
        model = setting.shard(make(Mlp), world)
        held, other = unit_of(model.layers[0]), unit_of(model.layers[1])
        held.copy.take(OTHERS)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain.model)]
        for step in range(2):
            loss_of(model(batch(Mlp, step, rank))).backward()
            assert held.copy.is_there
            assert held.copy.shows_shards
            assert not other.copy.is_there
            plain.step(step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        close(model, plain.model, str(setting))
        held.copy.drop(OTHERS)
        held.settle()
        assert not held.copy.is_there


# -- a route ---------------------------------------------------------------------------------------
class Halved(Route):
    """Gradients of a unit weigh half, in and between reductions. A power of two rounds nothing."""

    def put(self, gradients: Gradients, bucket: BucketGrads, found: Taken) -> None:
        super().put(gradients, bucket, [(index, grad * 0.5) for index, grad in found])

    def accumulate(self, gradients: Gradients, bucket: BucketGrads, found: Taken) -> None:
        super().accumulate(gradients, bucket, [(index, grad * 0.5) for index, grad in found])


@on_ranks(2)
def test_a_route(rank: int, world: int) -> None:
    for setting in EVERY:
        plain = Plain(make(Mlp), world)
        model = setting.shard(make(Mlp), world)
        layer = unit_of(model.layers[1])
        layer.gradients.route = Halved()
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            loss_of(model(batch(Mlp, micro, rank))).backward()
        plain.backward(*([batch(Mlp, m, r) for m in range(2)] for r in range(world)))
        for name, grad in plain.grads().items():
            assert grad is not None
            want = grad * 0.5 if name.startswith("layers.1.") else grad
            found = full(dict(model.named_parameters())[name].grad)
            assert torch.equal(found, want), f"{setting} {name}"
        assert all(u.gradients.route is USUAL for u in units_in(model) if u is not layer)


# -- a store ---------------------------------------------------------------------------------------
class OnDisk:
    """Keeps the state of an optimizer in files between its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self._folder = folder
        self.num_bytes = 0
        optimizer.register_step_pre_hook(self._bring)
        optimizer.register_step_post_hook(self._take)

    def _take(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for i, p in enumerate(params):
            for key in [k for k, v in optimizer.state[p].items() if v.ndim]:
                local = optimizer.state[p][key].to_local()
                np.save(self._folder / f"{i}.{key}.npy", local.numpy())
                self.num_bytes += local.nbytes
                local.fill_(float("nan"))  # whoever reads it before it is back will notice

    def _bring(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for path in self._folder.glob("*.npy"):
            i, key, _ = path.name.split(".")
            local = optimizer.state[params[int(i)]][key].to_local()
            local.copy_(torch.from_numpy(np.load(path)))


@on_ranks(2)
def test_a_store(rank: int, world: int) -> None:
    for setting in EVERY:
        plain = Plain(make(Mlp), world)
        model = setting.shard(make(Mlp), world)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain.model)]
        with tempfile.TemporaryDirectory() as folder:
            store = OnDisk(optimizers[0], Path(folder))
            for step in range(3):
                loss_of(model(batch(Mlp, step, rank))).backward()
                plain.step(step)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert store.num_bytes, "the shards' state went out"
        close(model, plain.model, str(setting))


def test_a_listener_hears_what_it_has_methods_for() -> None:
    """In the order of registration, those that came with units after the others."""
    told: list[str] = []

    class First:
        def called(self, unit: str) -> None:
            told.append(f"first {unit}")

    class Second(First):
        def called(self, unit: str) -> None:
            told.append(f"second {unit}")

    one, other = moments.Moments(), moments.Moments()
    second = Second()
    other.add(second)
    one.add(First())
    one.take_over(other)
    one.take_over(other)
    own = len(one.called) - 2
    for tell in one.called[own:]:
        tell("L0")
    assert told == ["first L0", "second L0"]
    assert len(one.gathering) == len(moments.Moments().gathering)
    one.remove(second)
    assert len(one.called) == own + 1


def test_moments_are_those_of_the_docstring() -> None:
    """Each name stands in the list that readers see, and in no other form."""
    text = moments.__doc__ or ""
    assert all(f"\n    {name}(" in text for name in moments.NAMES)
    assert text.count("(context)") + text.count("(unit") + text.count("(backward)") == len(
        moments.NAMES
    )
