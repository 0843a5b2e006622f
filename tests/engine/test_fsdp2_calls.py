"""Lists of modules as one unit, modules that run more than once, methods, exceptions."""

from __future__ import annotations

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
from torch.distributed._composable import checkpoint as composable_checkpoint

from ranks import on_ranks


# -- lists ---------------------------------------------------------------------------------------
class Chunked(nn.Module):
    """Norm and head of one unit; the head runs later, on chunks, outside of the root's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = TwoLayer()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


def chunked_step(model: Any, x: torch.Tensor) -> None:
    out = model(x)
    for part in out.chunk(2):
        model.head(part).square().sum().backward(retain_graph=True)


@engines
@on_ranks(2)
def test_a_head_that_is_called_in_chunks(engine: str, rank: int, world: int) -> None:
    torch.manual_seed(3)
    model, plain = both(Chunked())
    fs(engine).fully_shard(model.body, mesh=mesh_of(world))
    fs(engine).fully_shard([model.norm, model.head], mesh=mesh_of(world))
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    for step in range(2):
        for m in (model, plain):
            chunked_step(m, inputs(rank, step))
    mean_gradients(plain)
    same_parts(model, plain)


@engines
@on_ranks(2)
def test_chunks_without_sync_then_with(engine: str, rank: int, world: int) -> None:
    ends = []
    for grouped in (True, False):
        torch.manual_seed(3)
        model, plain = both(Chunked())
        units = [[model.norm, model.head]] if grouped else [model.norm, model.head]
        for unit in (model.body, *units, model):
            fs(engine).fully_shard(unit, mesh=mesh_of(world))
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            for m in (model, plain):
                chunked_step(m, inputs(rank, step))
        mean_gradients(plain)
        same_parts(model, plain)
        ends.append([p.grad.to_local() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        close(a, b, "grouped against ungrouped")


@engines
@on_ranks(2)
def test_kept_gathered_around_a_loop(engine: str, rank: int, world: int) -> None:
    torch.manual_seed(3)
    model, plain = both(Chunked())
    for unit in (model.body, model.norm, model.head, model):
        fs(engine).fully_shard(unit, mesh=mesh_of(world))
    for step in range(2):
        out, want = model(inputs(rank, step)), plain(inputs(rank, step))
        model.head.set_reshard_after_forward(False)
        model.head.set_reshard_after_backward(False)
        leaf, other = (t.detach().requires_grad_() for t in (out, want))
        for i in range(2):
            model.head.set_requires_gradient_sync(i == 1)
            model.head(leaf.chunk(2)[i]).square().sum().backward()
            plain.head(other.chunk(2)[i]).square().sum().backward()
            if i == 0:
                assert not shows_shards(model.head)
        model.head.reshard()
        assert shows_shards(model.head)
        model.head.set_reshard_after_forward(True)
        model.head.set_reshard_after_backward(True)
        out.backward(leaf.grad)
        want.backward(other.grad)
    mean_gradients(plain)
    same_parts(model, plain)


@engines
@on_ranks(2)
def test_part_of_a_list_runs_twice(engine: str, rank: int, world: int) -> None:
    """Two partial forwards of a group, one backward; its head is not used and has no gradient."""
    torch.manual_seed(3)
    model, plain = both(Chunked())
    fs(engine).fully_shard(model.body, mesh=mesh_of(world))
    fs(engine).fully_shard([model.norm, model.head], mesh=mesh_of(world))
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    for m in (model, plain):
        (m(inputs(rank)).sum() + m(inputs(rank, 1)).square().sum()).backward()
    mean_gradients(plain)
    assert plain.head.weight.grad is None
    same_parts(model, plain)


def note_dtype(seen: dict[str, torch.dtype], name: str, module: nn.Module, args: Any) -> None:
    seen[name] = args[0].dtype


@engines
@on_ranks(2)
def test_casts_of_each_module_of_a_list(engine: str, rank: int, world: int) -> None:
    seen: dict[str, torch.dtype] = {}
    torch.manual_seed(3)
    model = Chunked()
    for name in ("norm", "head"):
        getattr(model, name).register_forward_pre_hook(functools.partial(note_dtype, seen, name))
    policy = fs(engine).MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fs(engine).fully_shard([model.norm, model.head], mesh=mesh_of(world), mp_policy=policy)
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    out = model(inputs(rank))
    model.head(out.float())
    assert seen == {"norm": torch.bfloat16, "head": torch.bfloat16}
    assert out.dtype == torch.bfloat16


@engines
@on_ranks(2)
def test_a_module_that_is_fed_its_own_output(engine: str, rank: int, world: int) -> None:
    """The gradient of the second call's input is that of the first call's output."""
    for frozen in (False, True):
        block = TwoLayer()
        block.up.requires_grad_(not frozen)
        torch.manual_seed(5)
        model, plain = both(nn.Sequential(nn.Linear(8, 8), block, block))
        shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=True)
        train(model, plain, rank, steps=3)
        assert shows_shards(model)


@engines
@on_ranks(2)
def test_a_list_with_modules_at_both_ends(engine: str, rank: int, world: int) -> None:
    """The last module's backward is over long before the first one's."""
    for frozen in (False, True):
        torch.manual_seed(5)
        model, plain = both(nn.Sequential(*(TwoLayer() for _ in range(4))))
        for m in (model, plain):
            m[3].up.requires_grad_(not frozen)
        for unit in (model[1], [model[0], model[2], model[3]], model):
            fs(engine).fully_shard(unit, mesh=mesh_of(world), reshard_after_forward=True)
        train(model, plain, rank, steps=3)
        assert shows_shards(model)


# -- passes --------------------------------------------------------------------------------------
class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = TwoLayer(), TwoLayer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.own(self.shared(x)))


@engines
@on_ranks(2)
def test_a_module_that_runs_twice(engine: str, rank: int, world: int) -> None:
    for reshard in (True, False):
        torch.manual_seed(5)
        model, plain = both(Twice())
        shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=reshard)
        train(model, plain, rank, steps=3)


@engines
@on_ranks(2)
def test_two_forwards_before_one_backward(engine: str, rank: int, world: int) -> None:
    for recompute in (False, True):
        model, plain = both(tower(3))
        for block in model if recompute else ():
            composable_checkpoint(block)
        shard_tower(engine, model, mesh=mesh_of(world))
        for m in (model, plain):
            chosen, rejected = m(inputs(rank, 0)), m(inputs(rank, 1))
            (chosen.sum() - rejected.square().sum()).backward()
        mean_gradients(plain)
        same_parts(model, plain)


@engines
@on_ranks(2)
def test_after_an_exception_in_forward(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(3))
    shard_tower(engine, model, mesh=mesh_of(world))

    def fail(*args: Any) -> None:
        raise KeyError("on purpose")

    hook = model[1].up.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(inputs(rank))
    hook.remove()
    model.reset_iter_state() if hasattr(model, "reset_iter_state") else None
    train(model, plain, rank, steps=2)


@engines
@on_ranks(2)
def test_a_method_beside_forward(engine: str, rank: int, world: int) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = TwoLayer()
            self.proj = nn.Linear(8, 8)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.proj(self.block(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encode(x).square()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Encoder(), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder.encode(x))

    torch.manual_seed(2)
    model, plain = both(Whole())
    for module in (model.encoder, model):
        fs(engine).fully_shard(module, mesh=mesh_of(world))
    fs(engine).register_fsdp_forward_method(model.encoder, "encode")
    fs(engine).register_fsdp_forward_method(plain.encoder, "encode")  # does nothing there
    train(model, plain, rank, steps=2)
