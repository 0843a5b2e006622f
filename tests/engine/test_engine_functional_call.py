"""`torch.func.functional_call` on sharded models: what it puts in the place of parameters belongs
to the user for one call. The forward uses it, gradients go to it alone, and the model trains on.

All ranks have the same data, so a plain model on it says what is right.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import (
    STRATEGIES,
    Branches,
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
from torch.func import functional_call

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.core.state import units_in
from shardwise.engine.tensor.shard_tensor import ShardTensor

EVERY = settings(*STRATEGIES, reshard=(True, False))
FEW = settings("full_shard", "shard_grad_op")
Tensors = dict[str, torch.Tensor]


class Inside(nn.Module):
    """Calls its second layer with weights of its own making; the layer may be a unit."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x).tanh()
        made = {"weight": torch.diag(self.scale), "bias": self.scale * 2}
        once = functional_call(self.layers[1], made, (x,))
        return self.layers[1](once) + functional_call(self.layers[1], {"bias": self.scale}, (x,))


def both(setting: Setting, world: int, cls: type[nn.Module] = Mlp) -> tuple[nn.Module, Any]:
    return make(cls), setting.shard(make(cls), world)


def fast_of(plain: nn.Module, names: tuple[str, ...] = ()) -> Tensors:
    """Whole leaves of the user's own."""
    return {
        n: (p.detach() * 0.5).requires_grad_()
        for n, p in plain.named_parameters()
        if not names or n in names
    }


def same_step(plain: nn.Module, model: Any, what: str) -> None:
    """A usual step behind it is right, and nobody's gradient was left from before."""
    for m in (plain, model):
        loss_of(m(batch(plain, 1, 0))).backward()
    same_grads(model, {n: p.grad for n, p in plain.named_parameters()}, what)
    same_weights(model, {n: p.detach() for n, p in plain.named_parameters()}, what)
    for m in (plain, model):
        m.zero_grad()


@pytest.mark.parametrize("names", [(), ("layers.1.weight", "norm.bias")], ids=["all", "some"])
@on_ranks(2)
def test_gradients_go_to_what_was_passed(names: tuple[str, ...], rank: int, world: int) -> None:
    for setting in EVERY:
        plain, model = both(setting, world)
        for step in range(2):
            fast, wanted = fast_of(plain, names), fast_of(plain, names)
            x = batch(plain, step, 0)
            loss_of(functional_call(model, fast, (x,))).backward()
            loss_of(functional_call(plain, wanted, (x,))).backward()
            for name in fast:
                same(fast[name].grad, wanted[name].grad, f"{setting} {name}")
            same_grads(model, {n: p.grad for n, p in plain.named_parameters()}, str(setting))
            model.zero_grad()
            plain.zero_grad()
            same_step(plain, model, str(setting))


@on_ranks(2)
def test_inner_loops_of_second_order(rank: int, world: int) -> None:
    """MAML: two inner steps with `create_graph`, the outer loss on all of them; the first weights
    are computed from the model's own, whose gradients come through `full_tensor`.
    """
    for setting in EVERY:
        plain, model = both(setting, world)
        for step in range(2):
            losses = []
            start = {n: full(p).requires_grad_() for n, p in model.named_parameters()}
            wanted = {n: p.detach().clone().requires_grad_() for n, p in plain.named_parameters()}
            for m, first in ((plain, wanted), (model, start)):
                fast = first
                for i in range(2):
                    loss = loss_of(functional_call(m, fast, (batch(plain, i, 0),)))
                    grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                    fast = {n: w - 0.1 * g for (n, w), g in zip(fast.items(), grads, strict=True)}
                outer = loss_of(functional_call(m, fast, (batch(plain, 5 + step, 0),)))
                outer.backward()
                losses.append(outer.detach())
            same(losses[1], losses[0], f"{setting} loss")
            for name in start:
                same(start[name].grad, wanted[name].grad, f"{setting} {name}")
            same_step(plain, model, str(setting))


@on_ranks(2)
def test_what_is_gathered_ahead_in_vain(rank: int, world: int) -> None:
    """A unit that this call does not run is released: what was passed for it stays the user's."""
    plain, model = both(Setting("full_shard"), world, Branches)
    sw.set_prefetch(model, True)
    x = batch(plain, 0, 0)
    model(x, 0, 1, 2)  # the order that is expected next
    fast = fast_of(plain)
    passed = dict(fast)
    loss = loss_of(functional_call(model, fast, (x, 0, 1)))
    assert all(fast[name] is passed[name] for name in passed)
    want = loss_of(functional_call(plain, passed, (x, 0, 1)))
    names = [name for name in fast if "layers.2" not in name]
    for name, ours, theirs in zip(
        names,
        torch.autograd.grad(loss, [fast[name] for name in names]),
        torch.autograd.grad(want, [fast[name] for name in names]),
        strict=True,
    ):
        same(ours, theirs, name)


@on_ranks(2)
def test_inside_of_a_forward(rank: int, world: int) -> None:
    """The layer is a unit of its own, or a part of the outer one."""
    for setting in EVERY:
        for whole in (False, True):
            plain, model = make(Inside), make(Inside)
            options = setting.options(world)
            model = sw.fully_shard(model, **options) if whole else setting.shard(model, world)
            for _ in range(2):
                same_step(plain, model, f"{setting} {'one unit' if whole else 'nested'}")


@on_ranks(2)
def test_parameters_and_frozen_tensors(rank: int, world: int) -> None:
    """Another model's parameters (an ensemble), and tensors that need no gradient, in one call;
    the dictionary that was passed comes back as it was.
    """
    for setting in FEW:
        plain, model = both(setting, world)
        other = make(Mlp, seed=7)
        other.layers[0].requires_grad_(False)
        mine, theirs = dict(copy.deepcopy(other).named_parameters()), dict(other.named_parameters())
        before = dict(mine)
        x = batch(plain, 0, 0)
        loss_of(functional_call(model, mine, (x,))).backward()
        loss_of(functional_call(plain, theirs, (x,))).backward()
        assert all(mine[n] is before[n] for n in before), str(setting)
        for name in mine:
            same(mine[name].grad, theirs[name].grad, f"{setting} {name}")
        with torch.no_grad():
            for kind in (lambda t: t, torch.Tensor.detach):
                got = functional_call(model, {n: kind(t) for n, t in mine.items()}, (x,))
                same(got, functional_call(plain, theirs, (x,)), f"{setting} without gradients")
        same_step(plain, model, str(setting))


@on_ranks(2)
def test_as_the_first_forward_and_after_an_exception(rank: int, world: int) -> None:
    for setting in FEW:
        plain, model = both(setting, world)
        fast = fast_of(plain)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            functional_call(model, fast, (torch.ones(2, 5),))
        assert all(type(p) is ShardTensor for p in model.parameters())
        got, wanted = fast_of(plain), fast_of(plain)
        x = batch(plain, 0, 0)
        loss_of(functional_call(model, got, (x,))).backward()
        loss_of(functional_call(plain, wanted, (x,))).backward()
        for name in got:
            same(got[name].grad, wanted[name].grad, f"{setting} {name}")
        same_step(plain, model, str(setting))


@on_ranks(2)
def test_under_a_policy(rank: int, world: int) -> None:
    """Cast like the parameters, in a way that autograd can follow."""
    for setting in FEW:
        policy = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = setting.shard(make(Mlp), world, mp_policy=policy)
        plain = make(Mlp)
        fast, wanted = fast_of(plain), fast_of(plain)
        x = batch(plain, 0, 0)
        loss_of(functional_call(model, fast, (x,))).backward()
        cast = {n: t.to(torch.bfloat16) for n, t in wanted.items()}
        loss_of(functional_call(plain, cast, (x.to(torch.bfloat16),))).backward()
        for name in fast:
            assert fast[name].grad is not None and fast[name].grad.dtype == torch.float32
            same(fast[name].grad, wanted[name].grad, f"{setting} {name}", exact=False)


@on_ranks(2)
def test_sharded_tensors(rank: int, world: int) -> None:
    """Detached ones are taken over for the call (an average that lies like the model); those that
    need a gradient are refused.
    """
    for setting in FEW:
        plain, model = both(setting, world)
        x = batch(plain, 0, 0)
        average = {n: p.detach() * 0.5 for n, p in model.named_parameters()}
        with torch.no_grad():
            got = functional_call(model, average, (x,))
            want = functional_call(plain, {n: t * 0.5 for n, t in plain.named_parameters()}, (x,))
        same(got, want, str(setting))
        fast = {n: p * 0.5 for n, p in model.named_parameters()}
        with pytest.raises(NotImplementedError, match=r"\w\.\w+: functional_call with a sharded"):
            functional_call(model, fast, (x,))
        mixed = {n: p.detach() for n, p in model.named_parameters()}
        mixed["layers.1.bias"] = torch.zeros(8, requires_grad=True)
        with pytest.raises(
            NotImplementedError, match=r"sharded tensor for layers\.1\.weight and a"
        ):
            functional_call(model, mixed, (x,))
        same_step(plain, model, str(setting))


class TiedAround(nn.Module):
    """A weight of a unit that the root uses too, and a layer that runs twice."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.out = nn.Linear(8, 8)
        self.out.weight = self.layers[0].weight
        self.out.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[1]):
            x = layer(x).tanh()
        return self.out(x)


class TwoNames(nn.Module):
    """A layer under two names, where torch leaves behind what it has put there."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.again = self.layers[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.layers[1](self.layers[0](x)).tanh())


def same_call(plain: nn.Module, model: Any, what: str) -> None:
    """`functional_call` on both, and gradients of what was passed."""
    names = tuple(n for n, p in plain.named_parameters() if p.requires_grad)
    own = [(m._parameters, dict(m._parameters)) for m in plain.modules()]
    found = []
    for m in (plain, model):
        fast = fast_of(plain, names)
        loss = loss_of(functional_call(m, fast, (batch(plain, 3, 0),)))
        found.append(torch.autograd.grad(loss, list(fast.values())))
        for held, before in own:
            held.update(before)  # see `TwoNames`
    for name, want, got in zip(names, *found, strict=True):
        same(got, want, f"{what} {name}")


@on_ranks(2)
def test_ties_before_and_after_the_first_forward(rank: int, world: int) -> None:
    """What is passed for a tied weight is no new parameter of the unit that uses it too, whenever
    modules are looked through.
    """
    for setting in EVERY:
        plain, model = both(setting, world, TiedAround)
        held = list(model.parameters())
        for step in range(2):
            same_call(plain, model, f"{setting} {step}")
            assert all(a is b for a, b in zip(model.parameters(), held, strict=True)), setting
            nn.Linear(2, 2)  # the next call looks for new parameters
        same_step(plain, model, str(setting))
        names = [p.name for unit in units_in(model) for p in unit.params]
        assert sorted(names) == sorted(n for n, _ in model.named_parameters()), str(setting)


@on_ranks(2)
def test_a_new_parameter_is_taken_in_by_the_call(rank: int, world: int) -> None:
    """The unit is laid out anew, with its own values."""
    for setting in FEW:
        plain, model = both(setting, world)
        same_step(plain, model, str(setting))
        for m in (plain, model):
            m.layers[1].register_parameter("more", nn.Parameter(torch.ones(3)))
        names = ("layers.1.weight", "norm.bias")
        fast, wanted = fast_of(plain, names), fast_of(plain, names)
        x = batch(plain, 3, 0)
        loss_of(functional_call(model, fast, (x,))).backward()
        loss_of(functional_call(plain, wanted, (x,))).backward()
        for name in fast:
            same(fast[name].grad, wanted[name].grad, f"{setting} {name}")
        same_grads(model, {n: p.grad for n, p in plain.named_parameters()}, str(setting))
        for m in (plain, model):
            m.zero_grad()
        same_step(plain, model, str(setting))


@on_ranks(4)
def test_shards_over_a_smaller_world(rank: int, world: int) -> None:
    """Registering them after the first of two runs leaves guests alone."""
    for setting in settings(reshard=(2,)):
        plain, model = both(setting, world, TiedAround)
        same_step(plain, model, f"{setting} before")
        same_call(plain, model, str(setting))
        same_step(plain, model, str(setting))


@on_ranks(2)
def test_a_module_with_two_names(rank: int, world: int) -> None:
    """The parameter is back once a backward or a forward has begun."""
    for setting in EVERY:
        plain, model = both(setting, world, TwoNames)
        held = list(model.parameters())
        for _ in range(2):
            same_call(plain, model, str(setting))
            assert all(a is b for a, b in zip(model.parameters(), held, strict=True)), setting
        with torch.no_grad():
            functional_call(model, fast_of(plain), (batch(plain, 3, 0),))
        same(model(batch(plain, 3, 0)), plain(batch(plain, 3, 0)), str(setting))
        same_step(plain, model, str(setting))


@on_ranks(2)
def test_between_unshard_and_the_backward(rank: int, world: int) -> None:
    """The full parameters that the call found come back, and can be read; a forward that waits for
    its backward has it.
    """
    for setting in EVERY:
        plain, model = both(setting, world)
        same_step(plain, model, str(setting))
        for unit in (model, *model.layers):
            unit.unshard()
        loss = loss_of(functional_call(model, fast_of(plain), (batch(plain, 3, 0),)))
        same(model.layers[0].weight, plain.layers[0].weight, f"{setting} unsharded")
        loss.backward()
        for m in (plain, model):
            waiting = loss_of(m(batch(plain, 1, 0)))
            with torch.no_grad():
                functional_call(m, fast_of(plain), (batch(plain, 3, 0),))
            functional_call(m, fast_of(plain), (batch(plain, 3, 0),))
            waiting.backward()
        same_grads(model, {n: p.grad for n, p in plain.named_parameters()}, str(setting))
        for m in (plain, model):
            m.zero_grad()
        same_step(plain, model, str(setting))
