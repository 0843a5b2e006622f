"""Autograd around sharded modules: unused and frozen parts, containers, hooks, clipping."""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
import torch
import torch.nn as nn
from fsdp2_kit import (
    TwoLayer,
    both,
    close,
    engines,
    fs,
    inputs,
    mean_gradients,
    mesh_of,
    same_parts,
    shard_tower,
    shows_shards,
    tower,
    train,
)
from torch.distributed.tensor import DTensor

from ranks import on_ranks

Pair = collections.namedtuple("Pair", ["first", "second"])


# -- unused, frozen ------------------------------------------------------------------------------
class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.out = TwoLayer(), TwoLayer(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.used(x))


@engines
@on_ranks(2)
def test_a_block_that_does_not_run(engine: str, rank: int, world: int) -> None:
    for reshard in (True, False):
        torch.manual_seed(0)
        model, plain = both(Partly())
        for unit in (model.used, model.idle, model):
            fs(engine).fully_shard(unit, mesh=mesh_of(world), reshard_after_forward=reshard)
        train(model, plain, rank, steps=3)
        assert all(p.grad is None for p in model.idle.parameters())


@engines
@on_ranks(2)
def test_an_output_that_the_loss_does_not_reach(engine: str, rank: int, world: int) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return self.a(x), self.b(x)

    torch.manual_seed(0)
    model, plain = both(nn.Sequential(Two()))
    for unit in (model[0], model):
        fs(engine).fully_shard(unit, mesh=mesh_of(world))
    for step in range(3):
        for m in (model, plain):
            m(inputs(rank, step))[step % 2].square().sum().backward()
    mean_gradients(plain)
    same_parts(model, plain)


@engines
@on_ranks(2)
def test_frozen_parts(engine: str, rank: int, world: int) -> None:
    def biases(model: Any) -> None:
        for n, p in model.named_parameters():
            p.requires_grad_(n.endswith("bias"))

    def first(model: Any) -> None:
        model[0].requires_grad_(False)

    def middle(model: Any) -> None:
        model[1].requires_grad_(False)

    for freeze in (biases, first, middle):
        for reshard in (True, False):
            model, plain = both(tower(3))
            for m in (model, plain):
                freeze(m)
            shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=reshard)
            train(model, plain, rank, steps=3)
            assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@engines
@on_ranks(2)
def test_frozen_while_training(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(3))
    shard_tower(engine, model, mesh=mesh_of(world))
    for step in range(4):
        for m in (model, plain):
            m[step % 3].requires_grad_(step % 2 == 0)
            m(inputs(rank, step)).square().sum().backward()
        mean_gradients(plain)
        same_parts(model, plain)
        for m in (model, plain):
            m.zero_grad()


@engines
@on_ranks(2)
def test_a_frozen_model_passes_gradients_through(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(2))
    model.requires_grad_(False)
    shard_tower(engine, model, mesh=mesh_of(world))
    x, y = (inputs(rank).requires_grad_() for _ in range(2))
    model(x).square().sum().backward()
    plain(y).square().sum().backward()
    close(x.grad, y.grad, "gradient of the input")
    assert shows_shards(model)


# -- containers ----------------------------------------------------------------------------------
class Passes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, tree: Any) -> Any:
        x = tree if isinstance(tree, torch.Tensor) else None
        if x is None:
            parts = tree.values() if isinstance(tree, dict) else tree
            x = functools.reduce(torch.add, parts)
        a, b = self.a(x), self.b(x)
        return {
            "list": lambda: [a, b],
            "tuple": lambda: (a, b),
            "named": lambda: Pair(a, b),
            "dict": lambda: {"a": a, "b": b},
            "tensor": lambda: a + b,
        }[self.kind]()


@pytest.mark.parametrize("kind", ["list", "tuple", "named", "dict"])
@engines
@on_ranks(2)
def test_containers_in_and_out(engine: str, kind: str, rank: int, world: int) -> None:
    torch.manual_seed(0)
    model, plain = both(nn.Sequential(*(Passes(kind) for _ in range(3)), Passes("tensor")))
    shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=True)
    train(model, plain, rank, steps=2)
    assert shows_shards(model)


# -- hooks ---------------------------------------------------------------------------------------
@engines
@on_ranks(2)
def test_post_accumulate_hooks_of_sharded_parameters(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh_of(world))
    fired: dict[str, int] = collections.Counter()

    def hook(name: str, param: torch.Tensor) -> None:
        assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
        fired[name] += 1

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(functools.partial(hook, name))
    train(model, plain, rank, steps=3)
    assert set(fired.values()) == {3} and len(fired) == len(list(model.parameters()))


@engines
@on_ranks(2)
def test_an_optimizer_step_in_a_hook_is_a_step(engine: str, rank: int, world: int) -> None:
    ends = []
    for in_hook in (False, True):
        model = shard_tower(engine, tower(2), mesh=mesh_of(world))
        opts = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

        def step(param: torch.Tensor, opts: Any = opts) -> None:
            opts[param].step()
            opts[param].zero_grad()

        for p in model.parameters() if in_hook else ():
            p.register_post_accumulate_grad_hook(step)
        for i in range(3):
            model(inputs(rank, i)).square().sum().backward()
            for opt in opts.values() if not in_hook else ():
                opt.step()
                opt.zero_grad()
        ends.append([p.to_local().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@engines
@on_ranks(2)
def test_module_hooks_see_full_parameters(engine: str, rank: int, world: int) -> None:
    """Forward hooks of users, and full backward hooks, around and inside of units."""
    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh_of(world))
    log: list[tuple[str, bool]] = []
    block = model[0]
    block.register_forward_pre_hook(lambda m, a: log.append(("pre", shows_shards(m))))
    block.register_forward_hook(lambda m, a, o: log.append(("post", shows_shards(m))))
    block.down.register_full_backward_hook(lambda m, i, o: log.append(("inner", False)))
    train(model, plain, rank, steps=1)
    assert ("inner", False) in log and {n for n, _ in log} == {"pre", "post", "inner"}


# -- transforms ----------------------------------------------------------------------------------
@engines
@on_ranks(2)
def test_forward_mode_and_vmap(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh_of(world))
    x, t = inputs(rank), inputs(rank, 1)
    got, want = (torch.func.jvp(m, (x,), (t,)) for m in (model, plain))
    for a, b in zip(got, want, strict=True):
        close(a.detach(), b.detach(), "jvp")
    for m in (model, plain):
        _, tangent = torch.func.jvp(m, (x,), (t,))
        tangent.square().sum().backward()
    mean_gradients(plain)
    same_parts(model, plain)
    with torch.no_grad():
        close(torch.func.vmap(model)(x), torch.func.vmap(plain)(x), "vmap")


# -- clipping ------------------------------------------------------------------------------------
@pytest.mark.parametrize("norm_type", [2, 1, float("inf")])
@engines
@on_ranks(4)
def test_clipping_by_torchs_function(engine: str, norm_type: float, rank: int, world: int) -> None:
    for mesh in ((4,), (2, 2)):
        # torch's fails on a rank whose part is empty
        dim = 8 if engine == "torch" and norm_type == float("inf") else 5
        model, plain = both(tower(2, dim=dim))
        shard_tower(engine, model, mesh=mesh_of(*mesh))
        for m in (model, plain):
            m(inputs(rank, dim=dim) * 10).square().sum().backward()
        mean_gradients(plain)
        limit = 0.1
        norms = [
            torch.nn.utils.clip_grad_norm_(m.parameters(), limit, norm_type) for m in (model, plain)
        ]
        got = norms[0].full_tensor() if isinstance(norms[0], DTensor) else norms[0]
        close(got, norms[1], "norm")
        same_parts(model, plain)
        assert norms[1] > limit
