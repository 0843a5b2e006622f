"""Training with the models and calls that FSDP2's users have, beside an unsharded replica."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from engine_kit import Blocks, make
from fsdp2_kit import (
    OURS,
    TwoLayer,
    both,
    close,
    engines,
    fs,
    inputs,
    loss_of,
    mean_gradients,
    mesh_of,
    same_parts,
    shard_tower,
    shows_shards,
    tower,
    train,
)
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from ranks import on_ranks


def largest_dim(param: nn.Parameter) -> Shard:
    return Shard(max(range(param.ndim), key=param.size))


# -- what is registered when ---------------------------------------------------------------------
@engines
@on_ranks(2)
def test_what_modules_hold_between_forward_and_backward(engine: str, rank: int, world: int) -> None:
    for reshard, root, blocks in (
        (True, True, True),
        (False, False, False),
        (None, False, True),
        (world, True, True),
    ):
        model = shard_tower(
            engine, tower(2, gain=True), mesh=mesh_of(world), reshard_after_forward=reshard
        )
        for _ in range(2):
            out = model(inputs(rank))
            assert isinstance(model.gain, DTensor) == root, reshard
            assert all(shows_shards(block) == blocks for block in model), reshard
            out.sum().backward()
            assert shows_shards(model), reshard
        model(inputs(rank))
        model.reshard()
        assert isinstance(model.gain, DTensor)


@engines
@on_ranks(4)
def test_a_smaller_world_between_forward_and_backward(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(2, gain=True))
    shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=2)
    model(inputs(rank))
    weight = model[0].up.weight
    assert isinstance(weight, DTensor)
    assert weight.to_local().size(0) == -(-weight.size(0) // 2)
    for block in (*model, model):
        block.reshard()
    assert model[0].up.weight.to_local().size(0) == weight.size(0) // 4
    train(model, plain, rank)


# -- dtypes, devices -----------------------------------------------------------------------------
@pytest.mark.parametrize("swap", [False, True])
@engines
@on_ranks(2)
def test_to_another_dtype_after_sharding(engine: str, swap: bool, rank: int, world: int) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for placement in (None, largest_dim):
            model, plain = both(tower(2))
            shard_tower(engine, model, mesh=mesh_of(world), shard_placement_fn=placement)
            model.to(torch.float64)
            plain.to(torch.float64)
            for p in model.parameters():
                assert p.dtype == p.to_local().dtype == torch.float64
            double = lambda r, s: inputs(r, s).double()  # noqa: E731
            train(model, plain, rank, steps=2, make_inputs=double)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@engines
@on_ranks(1, 2)
def test_root_without_parameters_and_nested_inputs(engine: str, rank: int, world: int) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = TwoLayer()

        def forward(self, pair: Any, *, more: dict[str, Any]) -> Any:
            first, (second, _) = pair
            return {"a": self.block(first), "b": (self.block(second + more["x"]), 3)}["a"]

    torch.manual_seed(1)
    model, plain = both(Takes())
    fs(engine).fully_shard(model.block, mesh=mesh_of(world))
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    for m in (model, plain):
        x = inputs(rank)
        loss_of(m((x, [x, "text"]), more={"x": x})).backward()
    mean_gradients(plain)
    same_parts(model, plain)


# -- models --------------------------------------------------------------------------------------
@pytest.mark.parametrize("reshard", [True, False, None, 2])
@engines
@on_ranks(2)
def test_blocks(engine: str, reshard: Any, rank: int, world: int) -> None:
    for placement in (None, largest_dim):
        options = {"reshard_after_forward": reshard, "shard_placement_fn": placement}
        model, plain = both(tower(3, dim=6, gain=True))
        shard_tower(engine, model, mesh=mesh_of(world), **options)
        train(model, plain, rank, make_inputs=functools.partial(inputs, dim=6), steps=3)


@engines
@on_ranks(1, 2, 4)
def test_one_unit(engine: str, rank: int, world: int) -> None:
    for dim in (3, 8, 17):
        model, plain = both(tower(2, dim=dim))
        fs(engine).fully_shard(model, mesh=mesh_of(world))
        train(model, plain, rank, make_inputs=functools.partial(inputs, dim=dim), steps=3)


@engines
@on_ranks(4)
def test_replicas_of_shards(engine: str, rank: int, world: int) -> None:
    for dim in (3, 16):
        for level in (True, False):
            model, plain = both(tower(2, dim=dim))
            shard_tower(engine, model, mesh=mesh_of(2, 2), reshard_after_forward=level)
            train(model, plain, rank, make_inputs=functools.partial(inputs, dim=dim), steps=3)


@pytest.mark.parametrize("kind", ["composable", "function", "wrapper"])
@engines
@on_ranks(2)
def test_activation_checkpointing(engine: str, kind: str, rank: int, world: int) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Recomputes(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    for grouped in (False, True):
        plain = make(Blocks)
        model = make(Blocks)
        for i, block in enumerate(model.layers):
            if kind == "composable":
                composable_checkpoint(block)
            elif kind == "wrapper":
                model.layers[i] = checkpoint_wrapper(block)
        for block in model.layers:
            fs(engine).fully_shard(block, mesh=mesh_of(world))
        if kind == "function":
            for i, block in enumerate(model.layers):
                model.layers[i] = Recomputes(block)
        if grouped:
            fs(engine).fully_shard([model.norm, model.embed, model.head], mesh=mesh_of(world))
        fs(engine).fully_shard(model, mesh=mesh_of(world))
        for step in range(3):
            x = inputs(rank, step, dim=6)
            losses = [m(x).float().square().mean() for m in (model, plain)]
            close(losses[0].detach(), losses[1].detach(), f"loss {step}")
            for loss in losses:
                loss.backward()
            mean_gradients(plain)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                close(p.grad.full_tensor(), q.grad, "gradient", 1e-4)
            for m in (model, plain):
                torch.optim.SGD(m.parameters(), lr=0.01).step()
                m.zero_grad()


@engines
@on_ranks(2)
def test_no_gather_in_backward_where_none_is_needed(engine: str, rank: int, world: int) -> None:
    """An embedding's backward does not read its weight."""
    model, plain = make(Blocks), make(Blocks)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    plain.head.weight = nn.Parameter(plain.head.weight.detach().clone())
    fs(engine).fully_shard(model.embed, mesh=mesh_of(world))
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    model.embed.set_unshard_in_backward(False)
    train(model, plain, rank, make_inputs=functools.partial(inputs, dim=6), steps=3, rtol=1e-4)


# -- accumulation --------------------------------------------------------------------------------
@pytest.mark.parametrize("recurse", [True, False])
@engines
@on_ranks(4)
def test_accumulation(engine: str, recurse: bool, rank: int, world: int) -> None:
    for mesh in ((4,), (2, 2)):
        for mode in ("sync", "all_reduce", "reshard"):
            if mode == "all_reduce" and len(mesh) == 1:
                continue
            model, plain = both(tower(2, gain=True))
            shard_tower(engine, model, mesh=mesh_of(*mesh), reshard_after_forward=mode != "reshard")
            opts = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
            for step in range(2):
                for micro in range(3):
                    last = micro == 2
                    if mode == "all_reduce":
                        model.set_requires_all_reduce(last, recurse=recurse)
                    else:
                        model.set_requires_gradient_sync(last, recurse=recurse)
                    if mode == "reshard":
                        model.set_reshard_after_backward(last, recurse=recurse)
                    for m in (model, plain):
                        m(inputs(rank, 10 * step + micro)).square().sum().backward()
                mean_gradients(plain)
                same_parts(model, plain)
                for opt in opts:
                    opt.step()
                    opt.zero_grad(set_to_none=step == 0)


# -- ties ----------------------------------------------------------------------------------------
@engines
@on_ranks(2)
def test_ties_in_a_list_with_uneven_rows(engine: str, rank: int, world: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(7, 8), TwoLayer()
            self.head = nn.Linear(8, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed((x.abs() * 5).long() % 7)))

    torch.manual_seed(2)
    model, plain = both(Tied())
    fs(engine).fully_shard(model.body, mesh=mesh_of(world))
    fs(engine).fully_shard([model.embed, model.head], mesh=mesh_of(world))
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    assert model.embed.weight is model.head.weight
    train(model, plain, rank, steps=3)
    assert model.embed.weight is model.head.weight
    model.embed.unshard()
    assert model.embed.weight is model.head.weight and not isinstance(model.embed.weight, DTensor)
    model.embed.reshard()


@engines
@on_ranks(2)
def test_models_that_come_and_go(engine: str, rank: int, world: int) -> None:
    """Objects whose ids are used again are not taken for those that were sharded before."""
    import gc

    for i in range(6):
        with torch.device("meta"):
            model = tower(2)
        for block in model:
            block.to_empty(device="cpu")
            for p in block.parameters():
                nn.init.constant_(p, 0.1 * (i + 1))
            fs(engine).fully_shard(block, mesh=mesh_of(world))
            gc.collect()
        fs(engine).fully_shard(model, mesh=mesh_of(world))
        model(inputs(rank)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("engine", OURS)
@on_ranks(2)
def test_a_tie_of_two_units_trains(engine: str, rank: int, world: int) -> None:
    """torch refuses it ("already managed by another")."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    model, plain = both(Pair())
    dist.broadcast(plain.a.weight.data, 0), dist.broadcast(model.a.weight.data, 0)
    for m in (model, plain):
        nn.init.zeros_(m.a.bias), nn.init.zeros_(m.b.bias)
    for unit in (model.a, model.b, model):
        fs(engine).fully_shard(unit, mesh=mesh_of(world))
    train(model, plain, rank, steps=3)


# -- layouts in use ------------------------------------------------------------------------------
@engines
@on_ranks(2)
def test_everything_is_contiguous(engine: str, rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    seen: list[bool] = []

    def look(module: nn.Module, *_: Any) -> None:
        seen.extend(p.is_contiguous() for p in module.parameters(recurse=False))

    for layer in model:
        layer.register_forward_hook(look)
    fs(engine).fully_shard(
        model,
        mesh=mesh_of(world),
        shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else Shard(0),
    )
    model(inputs(rank, dim=4)).sum().backward()
    assert seen and all(seen)
    for p in model.parameters():
        assert p.to_local().is_contiguous() and p.grad.to_local().is_contiguous()
        assert p.full_tensor().is_contiguous()


# -- other optimizers, threads, hooks ------------------------------------------------------------
@pytest.mark.parametrize(
    "kind",
    ["SGD foreach", "SGD fused", "Adam foreach", "AdamW fused", "Adagrad", "RMSprop", "Adafactor"],
)
@engines
@on_ranks(2)
def test_optimizers(engine: str, kind: str, rank: int, world: int) -> None:
    name, _, form = kind.partition(" ")
    options: dict[str, Any] = {"lr": 0.01, **({form: True} if form else {})}
    if name == "SGD":
        options["momentum"] = 0.9
    if name == "Adafactor" and engine == "torch":
        pytest.skip("row and column statistics of shards are not those of the whole there")
    if form == "fused" and name == "SGD" and engine == "torch":
        pytest.skip("DTensor has no rule for it")
    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh_of(world))
    train(
        model,
        plain,
        rank,
        make_optimizer=functools.partial(getattr(torch.optim, name), **options),
        rtol=1e-4,
    )
