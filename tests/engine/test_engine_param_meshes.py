"""Meshes and placements parameter by parameter, and pipeline stages on slices of a mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from engine_kit import OPTIMIZERS, TRANSPORTS, full, local, loss_of, make
from mesh_kit import named_mesh, same_as_torch, torch_fully_shard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw
from ranks import on_ranks


# -- experts on fewer ranks ----------------------------------------------------------------------
class Experts(nn.Module):
    """A dense layer and an expert of which each expert-parallel rank has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 5)
        self.expert = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x) + torch.tanh(self.expert(x))


def expert_model(mesh: DeviceMesh) -> Any:
    """Mesh dims (edp, ep); the expert depends on the place on `ep`."""
    model = make(Experts)
    torch.manual_seed(10 + mesh.get_local_rank("ep"))
    model.expert.reset_parameters()
    return model


def placement_fn(model: Any, mesh_info: Any, result: Any) -> Any:
    experts = set(model.expert.parameters())
    return lambda p: result(Shard(p.ndim - 1), mesh_info) if p in experts else None


@pytest.mark.parametrize("strategy", [None, "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(4, timeout_s=120)
def test_experts_on_a_mesh_of_their_own(
    rank: int, world: int, transport: str, strategy: str | None
) -> None:
    mesh = named_mesh(edp=2, ep=2)
    whole = mesh._flatten("everyone")
    model = expert_model(mesh)
    plain = copy.deepcopy(model)
    fn = placement_fn(model, mesh["edp"], sw.ShardPlacementResult)
    sw.fully_shard(model, mesh=whole, shard_placement_fn=fn, transport=transport, strategy=strategy)
    assert model.expert.weight.device_mesh == mesh["edp"]
    assert model.dense.weight.device_mesh == whole
    if strategy is None:
        assert model.expert.weight.placements == (Shard(1),)
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, plain)]
    for step in range(3):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        for m in (model, plain):
            loss_of(m(x)).backward()
        for p in plain.dense.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        for p in plain.expert.parameters():
            dist.all_reduce(p.grad, group=mesh.get_group("edp"))
            p.grad /= 2
        for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=n)
        norm = sw.clip_grad_norm_(model.parameters(), 1e9)
        own = torch.stack([g.norm() for q in plain.parameters() if (g := q.grad) is not None])
        torch.testing.assert_close(norm, own.norm())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (n, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(full(p), q[1].detach(), rtol=1e-5, atol=1e-6, msg=n)


@on_ranks(4, timeout_s=120)
def test_torchs_own_mesh_info(rank: int, world: int) -> None:
    """The same placements, meshes and bits as torch gives them."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        ShardPlacementResult,
    )

    mesh = named_mesh(edp=2, ep=2)
    info = FSDPMeshInfo(mesh["edp"], shard_mesh_dim=0)
    ours, theirs = expert_model(mesh), expert_model(mesh)
    for p in (*ours.expert.parameters(), *theirs.expert.parameters()):
        p.data = p.data[..., :4].contiguous() if p.ndim == 1 else p.data[:4, :4].contiguous()
    for model, shard in ((ours, sw.fully_shard), (theirs, torch_fully_shard)):
        model.forward = lambda x, m=model: m.expert(x[:, :4]).sum() + m.dense(x).sum()
        shard(
            model,
            mesh=mesh["ep"],
            shard_placement_fn=placement_fn(model, info, ShardPlacementResult),
        )
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
        model(x).backward()
    same_as_torch(ours, theirs, "torch's mesh info")


@on_ranks(4)
def test_different_dense_weights_are_found_and_experts_left_alone(rank: int, world: int) -> None:
    mesh = named_mesh(edp=2, ep=2)
    model = expert_model(mesh)
    with torch.no_grad():
        model.dense.bias += rank
        model.expert.bias += mesh.get_local_rank("edp")
    expert = expert_model(mesh).expert
    fn = placement_fn(model, mesh["edp"], sw.ShardPlacementResult)
    sw.fully_shard(model, mesh=mesh._flatten("everyone"), shard_placement_fn=fn)
    assert torch.equal(full(model.dense.bias), make(Experts).dense.bias.detach())
    assert torch.equal(full(model.expert.bias), expert.bias.detach())
    assert torch.equal(full(model.expert.weight), expert.weight.detach())


@on_ranks(4, timeout_s=120)
def test_expert_parallel_dtensors(rank: int, world: int) -> None:
    """Expert weights stacked and cut over `ep`, sharded further over `edp`."""
    mesh = named_mesh(edp=2, ep=2)
    stacked = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0))
    model: Any = nn.Module()
    model.dense = make(lambda: nn.Linear(3, 3))
    cut = distribute_tensor(stacked, mesh["ep"], [Shard(0)])
    model.experts = nn.Parameter(cut)
    model.forward = lambda x: (model.dense(x) @ model.experts.to_local()).square().sum()
    experts = model.experts

    def fn(p: Any) -> Any:
        return sw.ShardPlacementResult(Shard(1), mesh["edp"]) if p is experts else None

    sw.fully_shard(model, mesh=mesh._flatten("everyone"), shard_placement_fn=fn)
    assert model.experts.placements == (Shard(1), Shard(0))
    assert model.experts.device_mesh == mesh
    assert torch.equal(full(model.experts), stacked)
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))
    model(x).backward()
    own = stacked.chunk(2)[mesh.get_local_rank("ep")].clone().requires_grad_()
    dense = make(lambda: nn.Linear(3, 3))
    (dense(x) @ own).square().sum().backward()
    assert own.grad is not None
    dist.all_reduce(own.grad, group=mesh.get_group("edp"))
    want = (own.grad / 2).chunk(2, 1)[mesh.get_local_rank("edp")]
    torch.testing.assert_close(local(model.experts.grad), want, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_results_that_are_refused(rank: int, world: int) -> None:
    model = make(Experts)
    with pytest.raises(ValueError, match=r"dense\.weight: shard_placement_fn must return"):
        sw.fully_shard(model, shard_placement_fn=lambda p: 1)
    with pytest.raises(ValueError, match=r"dense\.weight: .*DeviceMesh of 1 dim"):
        sw.fully_shard(model, shard_placement_fn=lambda p: sw.ShardPlacementResult(None, "dp"))


# -- pipeline stages -----------------------------------------------------------------------------
class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def stages_of(model: Any, number: int, per_rank: int, mesh: DeviceMesh, how: dict[str, Any]) -> Any:
    """This pipeline rank's stages, as torch's pipelining places them, with their layers' names."""
    from torch.distributed.pipelining import PipelineStage

    place, size = mesh.get_local_rank("pp"), mesh["pp"].size()
    stages, layers = [], {}
    for index in range(place, number, size):
        depth = 4 // number
        part = nn.Sequential()
        for i in range(index * depth, (index + 1) * depth):
            part.append(nn.Sequential(model.layers[i], nn.Tanh()))
            layers[i] = model.layers[i]
            sw.fully_shard(part[-1], mesh=mesh["dp"], **how)
        sw.fully_shard(part, mesh=mesh["dp"], **how)
        stages.append(
            PipelineStage(part, index, number, torch.device("cpu"), group=mesh.get_group("pp"))
        )
    return stages, layers


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(4, timeout_s=180)
def test_pipeline_stages(rank: int, world: int, schedule: str, transport: str) -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    mesh = named_mesh(pp=2, dp=2)
    data = mesh.get_local_rank("dp")
    per_rank = 2 if schedule == "Interleaved1F1B" else 1
    stages, layers = stages_of(make(Chain), 2 * per_rank, per_rank, mesh, {"transport": transport})
    runs = get_schedule_class(schedule)(
        stages if per_rank > 1 else stages[0], 8, loss_fn=lambda out, y: (out - y).square().mean()
    )
    xs = [torch.randn(16, 6, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    if mesh.get_local_rank("pp") == 0:
        runs.step(xs[data])
    else:
        runs.step(target=xs[data].cos())
    plain = make(Chain)
    for x in xs:
        for part in x.chunk(8):
            ((plain(part) - part.cos()).square().mean() / 16).backward()
    for i, layer in layers.items():
        for (n, p), q in zip(layer.named_parameters(), plain.layers[i].parameters(), strict=True):
            torch.testing.assert_close(
                full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=f"{schedule}: layer {i}, {n}"
            )
