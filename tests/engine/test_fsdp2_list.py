"""Behaviours of FSDP2 that the other files of this row do not look at, torch beside us."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from fsdp2_kit import (
    OURS,
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
    tower,
)
from mesh_kit import named_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from ranks import on_ranks


@engines
@on_ranks(2)
def test_sharding_under_a_meta_device(engine: str, rank: int, world: int) -> None:
    for dim in (8, 5, 1):  # even, uneven, empty parts
        with torch.device("meta"):
            model = nn.Sequential(TwoLayer(dim, 3), TwoLayer(dim, 3))
            policy = fs(engine).MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            shard_tower(engine, model, mesh=mesh_of(world), mp_policy=policy)
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        torch.manual_seed(7)
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
        model(inputs(rank, dim=dim)).float().square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert all(torch.isfinite(p.to_local()).all() for p in model.parameters())


@engines
@on_ranks(4)
def test_a_gradient_scaler_over_replicas(engine: str, rank: int, world: int) -> None:
    model = tower(2)
    shard_tower(engine, model, mesh=mesh_of(2, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.full_tensor() for p in model.parameters()]
    for is_finite in (False, True):
        scaler.scale(model(inputs(rank)).sum()).backward()
        if not is_finite and rank % 2 == 0:  # replicas have the same gradients
            next(model.parameters()).grad.to_local()[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        now = [p.full_tensor() for p in model.parameters()]
        same = [torch.equal(a, b) for a, b in zip(before, now, strict=True)]
        assert all(same) != is_finite and any(same) != is_finite
    assert scaler.get_scale() == 2.0
    if engine != "torch":  # an inf of one replica alone: torch's other replicas step
        scaler.scale(model(inputs(rank)).sum()).backward()
        if rank == 0:
            next(model.parameters()).grad.to_local()[0, 0] = float("inf")
        before = [p.full_tensor() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        for a, p in zip(before, model.parameters(), strict=True):
            assert torch.equal(a, p.full_tensor())
        assert scaler.get_scale() == 1.0


@engines
@on_ranks(4)
def test_host_offload_replicas_and_accumulation(engine: str, rank: int, world: int) -> None:
    for dim in (3, 16, 17):
        model, plain = both(tower(2, dim=dim))
        policy = fs(engine).CPUOffloadPolicy(pin_memory=False)
        shard_tower(engine, model, mesh=mesh_of(2, 2), offload_policy=policy)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
        for step in range(2):
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                for m in (model, plain):
                    m(inputs(rank, 3 * step + micro, dim=dim)).square().mean().backward()
            mean_gradients(plain)
            same_parts(model, plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@engines
@on_ranks(2)
def test_replicated_around_sharded(engine: str, rank: int, world: int) -> None:
    """`replicate` (DDP) averages the rest; plain and sharded tensors meet in one optimizer. The
    registry of contracts tells it what is sharded: no `install()` is needed.
    """
    from torch.distributed._composable.replicate import replicate

    model, plain = both(nn.Sequential(tower(1), nn.Linear(8, 8)))
    for m in (model, plain):
        dist.broadcast(m[1].weight.data, 0), dist.broadcast(m[1].bias.data, 0)
    fs(engine).fully_shard(model[0], mesh=mesh_of(world))
    replicate(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(2):
        for m in (model, plain):
            m(inputs(rank, step)).square().sum().backward()
        mean_gradients(plain)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            close(got, q.grad, "gradient")
        with implicit_replication():
            optimizers[0].step()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@engines
@on_ranks(4)
def test_tensor_parallel_with_uneven_dims_recomputed(engine: str, rank: int, world: int) -> None:
    mesh = named_mesh(dp=2, tp=2)
    data_rank = rank // 2
    for dim in (3, 17):
        torch.manual_seed(dim)
        model, plain = both(nn.Sequential(*(TwoLayer(dim, 2) for _ in range(2))))
        for block in model:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            fs(engine).fully_shard(block, mesh=mesh["dp"])
        fs(engine).fully_shard(model, mesh=mesh["dp"])

        def run(m: Any, x: torch.Tensor) -> torch.Tensor:
            for block in m:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-4) for m in (model, plain)]
        for step in range(2):
            for m in (model, plain):
                run(m, inputs(data_rank, step, dim=dim)).square().sum().backward()
            mean_gradients(plain)  # over all ranks: those of a tensor pair hold the same
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                close(p.grad.full_tensor(), q.grad, f"{dim}: {name}", 1e-4)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@engines
@on_ranks(4)
def test_state_dict_on_three_dims(engine: str, rank: int, world: int) -> None:
    mesh = named_mesh(dp=2, rows=1, tp=2)
    torch.manual_seed(3)
    model, plain = both(nn.Sequential(TwoLayer(8, 2), TwoLayer(8, 2)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fs(engine).fully_shard(block, mesh=mesh["dp", "rows"])
    fs(engine).fully_shard(model, mesh=mesh["dp", "rows"])
    saved = model.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(saved[name].full_tensor(), tensor), name
    held = {name: tensor.clone() for name, tensor in saved.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(held)
    x = inputs(0)
    close(model(x), plain(x), "output")


@engines
@on_ranks(2)
def test_a_resumed_run_has_the_same_losses(
    engine: str, rank: int, world: int, tmp_path: Any
) -> None:
    """DCP's get and set functions on a mesh of two dims (one of them of one rank)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh = named_mesh(dp=1, tp=2)

    def build() -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = nn.Sequential(TwoLayer(8, 2), TwoLayer(8, 2))
        for block in model:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            fs(engine).fully_shard(block, mesh=mesh["dp"])
        fs(engine).fully_shard(model, mesh=mesh["dp"])
        return model, torch.optim.Adam(model.parameters(), lr=0.05)

    def steps(model: Any, optimizer: Any, numbers: range) -> list[float]:
        losses = []
        for step in numbers:
            loss = model(inputs(0, step)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = build()
    steps(model, optimizer, range(3))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=str(tmp_path / "c"))
    want = steps(model, optimizer, range(3, 6))
    model, optimizer = build()
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=str(tmp_path / "c"))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert steps(model, optimizer, range(3, 6)) == want


@engines
@on_ranks(2)
def test_an_unused_head_of_a_list(engine: str, rank: int, world: int) -> None:
    """Two forwards of a part of a unit before one backward; what never ran has no gradient."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = TwoLayer()
            self.one, self.two, self.never = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.body(x)
            return self.one(y) + self.two(self.one(x))

    torch.manual_seed(0)
    model, plain = both(Heads())
    fs(engine).fully_shard(model.body, mesh=mesh_of(world))
    fs(engine).fully_shard([model.one, model.two, model.never], mesh=mesh_of(world))
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    for m in (model, plain):
        (m(inputs(rank)).sum() + m(inputs(rank, 1)).square().sum()).backward()
    mean_gradients(plain)
    assert model.never.weight.grad is None
    same_parts(model, plain)


@pytest.mark.parametrize("engine", OURS)
@on_ranks(2)
def test_prefetching_from_what_is_not_sharded_is_refused(
    engine: str, rank: int, world: int
) -> None:
    model = shard_tower(engine, tower(2), mesh=mesh_of(world))
    with pytest.raises(ValueError, match="expected FSDPModules, found Linear"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
