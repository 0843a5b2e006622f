"""`fully_shard` itself: what it accepts, refuses, moves, cuts and replaces, before any training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from fsdp2_kit import (
    ENGINES,
    OURS,
    TwoLayer,
    both,
    engines,
    fs,
    inputs,
    mean_gradients,
    mesh_of,
    same_parts,
    shard_tower,
    tower,
    train,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ranks import on_ranks


# -- cuts ----------------------------------------------------------------------------------------
@engines
@on_ranks(2, 3)
def test_parts_are_those_of_chunk(engine: str, rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1), nn.Conv2d(2, 4, 3))
    plain = copy.deepcopy(model)
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(p, nn.Parameter) and isinstance(p, DTensor)
        assert p.placements == (Shard(0),) and p.device_mesh == mesh_of(world)
        assert (p.size(), p.stride()) == (q.size(), q.stride())
        chunks = q.chunk(world, 0)
        mine = chunks[rank] if rank < len(chunks) else q[:0]
        assert torch.equal(p.to_local(), mine) and p.to_local().shape == mine.shape


@engines
@on_ranks(2)
def test_one_module_in_two_places_is_sharded_once(engine: str, rank: int, world: int) -> None:
    block = TwoLayer()
    model = nn.Sequential(block, nn.Linear(8, 8), block)
    names = [n for n, _ in model.named_parameters()]
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    assert [n for n, _ in model.named_parameters()] == names
    assert model[0] is model[2]


@engines
@on_ranks(2)
def test_placement_function(engine: str, rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Conv2d(2, 4, 2))
    plain = copy.deepcopy(model)

    def choose(p: nn.Parameter) -> Shard | None:
        return {2: Shard(-1), 4: Shard(1)}.get(p.ndim)

    fs(engine).fully_shard(model, mesh=mesh_of(world), shard_placement_fn=choose)
    assert [p.placements[0] for p in model.parameters()] == [Shard(1), Shard(0)] * 2
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_a_dim_that_is_not_there(engine: str, rank: int, world: int) -> None:
    with pytest.raises(AssertionError, match="Shard dim 1 is invalid for 1D tensor"):
        fs(engine).fully_shard(
            nn.Linear(4, 4), mesh=mesh_of(world), shard_placement_fn=lambda p: Shard(1)
        )


@pytest.mark.parametrize("engine", OURS)
@on_ranks(2)
def test_better_than_torch(engine: str, rank: int, world: int) -> None:
    """Scalars, uneven columns, channels-last weights, copies: refused there."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(4, 4, 3, padding=1))
    model[1].to(memory_format=torch.channels_last)
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    model.forward = lambda x: model[1](model[0](x).view(-1, 4, 1, 1)) * model.scale
    plain = copy.deepcopy(model)
    plain.forward = lambda x: plain[1](plain[0](x).view(-1, 4, 1, 1)) * plain.scale
    for m in (model, plain):
        dist.broadcast(m[0].weight.data, 0)
    fs(engine).fully_shard(
        model, mesh=mesh_of(world), shard_placement_fn=lambda p: Shard(p.ndim - 1 if p.ndim else 0)
    )
    for name, p in plain.named_parameters():
        p.data = dict(model.named_parameters())[name].full_tensor().detach().clone()
    for m in (model, plain):
        m(inputs(rank, dim=3)).square().sum().backward()
    mean_gradients(plain)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    twin = copy.deepcopy(tower(2))
    shard_tower(engine, twin, mesh=mesh_of(world))
    copy.deepcopy(twin)(inputs(rank)).sum().backward()


# -- refusals ------------------------------------------------------------------------------------
@engines
@on_ranks(2)
def test_refusals(engine: str, rank: int, world: int) -> None:
    shard = fs(engine).fully_shard
    model = nn.Linear(4, 4)
    shard(model, mesh=mesh_of(world))
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        shard(model, mesh=mesh_of(world))
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(ValueError, match="containers that do not implement forward"):
            shard(container, mesh=mesh_of(world))
    nameless = DeviceMesh("cpu", torch.arange(world).view(1, world))
    with pytest.raises(AssertionError, match="Please init the 2D mesh for HSDP with mesh_dim"):
        shard(nn.Linear(4, 4), mesh=nameless)


@engines
@on_ranks(2)
def test_ignored_parameters_stay_plain(engine: str, rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ignored = {model[1].weight}
    fs(engine).fully_shard(model, mesh=mesh_of(world), ignored_params=ignored)
    assert type(model[1].weight) is nn.Parameter and isinstance(model[1].bias, DTensor)
    model(inputs(rank, dim=4)).sum().backward()
    assert type(model[1].weight.grad) is torch.Tensor


# -- classes -------------------------------------------------------------------------------------
@engines
@on_ranks(2)
def test_the_class_is_swapped_on_that_module_only(engine: str, rank: int, world: int) -> None:
    names = fs(engine)
    model = nn.Sequential(TwoLayer(), TwoLayer(), nn.Linear(8, 8))
    names.fully_shard(model[0], mesh=mesh_of(world))
    out = names.fully_shard(model, mesh=mesh_of(world))
    assert out is model
    assert isinstance(model, names.FSDPModule) and isinstance(model, nn.Sequential)
    assert type(model).__name__ == "FSDPSequential" and type(model[0]).__name__ == "FSDPTwoLayer"
    assert isinstance(model[0], TwoLayer) and not isinstance(model[1], names.FSDPModule)
    assert not isinstance(TwoLayer(), names.FSDPModule)
    assert type(model[:2]) is nn.Sequential and len(model[:2]) == 2
    pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert names.fully_shard(pair, mesh=mesh_of(world)) is pair
    assert all(isinstance(m, names.FSDPModule) for m in pair)


# -- meshes --------------------------------------------------------------------------------------
@engines
@on_ranks(4)
def test_a_mesh_of_given_groups(engine: str, rank: int, world: int) -> None:
    reference = mesh_of(2, 2)
    made = DeviceMesh.from_group(
        [reference.get_group(0), reference.get_group(1)],
        "cpu",
        mesh=reference.mesh,
        mesh_dim_names=("copies", "parts"),
    )
    ends = []
    for mesh in (reference, made):
        model, plain = both(tower(2))
        shard_tower(engine, model, mesh=mesh)
        assert model[0].up.weight.placements == (Replicate(), Shard(0))
        train(model, plain, rank, steps=2)
        ends.append([p.to_local() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@engines
@on_ranks(2)
def test_all_ranks_without_a_mesh(engine: str, rank: int, world: int) -> None:
    model = fs(engine).fully_shard(nn.Linear(4, 4))
    assert model.weight.device_mesh.size() == world


@engines
@on_ranks(4)
def test_writes_to_local_parts_of_replicas_are_seen(engine: str, rank: int, world: int) -> None:
    """How ranks of a replicate axis are brought together by hand."""
    model = shard_tower(engine, tower(2), mesh=mesh_of(2, 2))
    model(inputs(rank)).sum().backward()
    group = mesh_of(2, 2).get_group(0)
    source = dist.get_process_group_ranks(group)[0]
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().add_(float(rank // 2))
            dist.broadcast(p.to_local(), source, group=group)
            p.grad = None
    if engine != "torch":
        fs(engine).mark_dirty(model)
    whole = tower(2)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs(rank)), whole(inputs(rank)))


# -- parameters that are replaced ----------------------------------------------------------------
@engines
@on_ranks(2)
def test_parameters_replaced_before_the_first_forward(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh_of(world))
    for m in (model, plain):
        for module in m.modules():
            if isinstance(module, nn.Linear):
                old = module.weight
                module.weight = nn.Parameter(old.detach() * 2)
    train(model, plain, rank, steps=2)


@engines
@on_ranks(2)
def test_meta_by_hand(engine: str, rank: int, world: int) -> None:
    """to_empty and reset_parameters; even, uneven and empty parts; reading meta is an error."""
    for dim in (8, 5, 1):
        with torch.device("meta"):
            model = nn.Sequential(*(TwoLayer(dim, 3, buffer=True) for _ in range(2)))
        shard_tower(engine, model, mesh=mesh_of(world))
        assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
        if engine != "torch":  # whose units stay half started after this error
            with pytest.raises(RuntimeError, match=r"0\.up\.weight"):
                model(inputs(rank, dim=dim))
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        before = [p.full_tensor() for p in model.parameters()]
        loss = model(inputs(rank, dim=dim)).square().sum()
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss)
        assert all(not torch.equal(a, p.full_tensor()) for a, p in
                   zip(before[:1], model.parameters(), strict=False))  # fmt: skip


@engines
@on_ranks(2)
def test_meta_then_assigned_state_dict(engine: str, rank: int, world: int) -> None:
    for tied in (False, True):

        def build(tied: bool = tied) -> Any:
            model = nn.Sequential(nn.Embedding(8, 8), TwoLayer(), nn.Linear(8, 8, bias=False))
            if tied:
                model[2].weight = model[0].weight
            return model

        torch.manual_seed(4)
        plain = build()
        with torch.device("meta"):
            model = build()
        for m in (model,):
            fs(engine).fully_shard(m[1], mesh=mesh_of(world))
            fs(engine).fully_shard(m, mesh=mesh_of(world))
        holds = model.state_dict()
        parts = {
            n: distribute_tensor(t, holds[n].device_mesh, holds[n].placements)
            for n, t in plain.state_dict().items()
        }
        model.load_state_dict(parts, assign=True)
        tokens = torch.arange(6).view(2, 3)
        for step in range(2):
            losses = [m(tokens + step).square().sum() for m in (model, plain)]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
            mean_gradients(plain)
            same_parts(model, plain)
        assert (model[0].weight is model[2].weight) == tied


@pytest.mark.parametrize("engine", OURS)
@on_ranks(2)
def test_a_tie_that_was_cut_after_sharding_is_named(engine: str, rank: int, world: int) -> None:
    """torch ties it again, with the values of the first place, without a word."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    model[2].weight = nn.Parameter(model[0].weight.detach() * 2)
    with pytest.raises(RuntimeError, match=r"weight.*were one parameter when they were sharded"):
        model(inputs(rank))


@engines
@on_ranks(2)
def test_buffers_stay_whole(engine: str, rank: int, world: int) -> None:
    model = shard_tower(engine, tower(2, buffer=True), mesh=mesh_of(world))
    for _, buffer in model.named_buffers():
        assert not isinstance(buffer, DTensor)


@engines
@on_ranks(2)
def test_a_frozen_float8_parameter_beside_float32(engine: str, rank: int, world: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            eighth = torch.arange(16.0).view(4, 4).to(torch.float8_e4m3fn)
            self.low = nn.Parameter(eighth, requires_grad=False)
            self.high = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.low.float() @ self.high

    model, plain = both(Mixed())
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    for m in (model, plain):
        m(inputs(rank, dim=4)).square().sum().backward()
    mean_gradients(plain)
    torch.testing.assert_close(model.high.grad.full_tensor(), plain.high.grad)
    assert model.low.grad is None


# -- all-reduce hook -----------------------------------------------------------------------------
@engines
@on_ranks(4)
def test_an_all_reduce_hook_makes_replicas_of_a_shard_mesh(
    engine: str, rank: int, world: int
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh["parts"])
    group, seen = mesh["copies"].get_group(), []

    def hook(output: torch.Tensor) -> None:
        seen.append(output.dtype)
        dist.all_reduce(output, group=group)
        output /= 2

    for block in model:
        block.set_all_reduce_hook(hook)
    for m in (model, plain):
        m(inputs(rank)).square().sum().backward()
    mean_gradients(plain)
    same_parts(model, plain)
    assert seen == [torch.float32] * 2


@engines
@on_ranks(2)
def test_a_hook_stream_on_native_replicas(engine: str, rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))
    model = fs(engine).fully_shard(nn.Linear(4, 4), mesh=mesh)
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        model.set_all_reduce_hook(lambda out: None, stream=object())
