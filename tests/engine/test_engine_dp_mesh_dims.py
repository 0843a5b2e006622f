"""`dp_mesh_dims`: the data parallel dims of a larger mesh by name, and what meshes are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import OPTIMIZERS, Mlp, batch, full, local, loss_of, make
from mesh_kit import named_mesh, pairs, replicated, same_as_torch, shard_layers, torch_fully_shard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwise as sw
from ranks import on_ranks

Dims = sw.DataParallelMeshDims


def torch_dims(dims: Any) -> Any:
    from torch.distributed.fsdp import DataParallelMeshDims

    return DataParallelMeshDims(dims.shard, dims.replicate)


class Tensorwise(nn.Module):
    """Two layers over DTensors on the whole mesh; the activations are DTensors too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 6)])

    def forward(self, x: Any) -> Any:
        return self.layers[1](torch.relu(self.layers[0](x)))


def tensorwise(mesh: DeviceMesh, tensor: str = "") -> Any:
    """Replicated, but for the `tensor` dim: rows of the first layer, columns of the second."""
    model = make(Tensorwise)
    for layer, cut in zip(
        model.layers, ((Shard(0), Shard(0)), (Shard(1), Replicate())), strict=True
    ):
        for key, placement in zip(("weight", "bias"), cut, strict=True):
            placements: list[Any] = [Replicate()] * mesh.ndim
            if tensor:
                placements[mesh.mesh_dim_names.index(tensor)] = placement  # type: ignore[union-attr]
            whole = getattr(layer, key).detach()
            layer.register_parameter(
                key, nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None))
            )
    return model


def inputs(mesh: DeviceMesh, dims: Any) -> Any:
    """Rows cut over the data parallel dims."""
    data = {*dims.shard_names, *dims.replicate_names}
    cut = [Shard(0) if name in data else Replicate() for name in mesh.mesh_dim_names or ()]
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    return distribute_tensor(x, mesh, cut, src_data_rank=None)


def loss(model: Any, x: Any, num_data: int) -> torch.Tensor:
    """The mean over all rows once gradients are averaged over the data parallel ranks."""
    out = model(x)
    out = out.redistribute(placements=x.placements)
    return out.to_local(grad_placements=out.placements).square().sum() * num_data / 8


CASES: dict[str, tuple[dict[str, int], Any, str]] = {
    "one dim": ({"dp": 4}, Dims(shard="dp"), ""),
    "two shard dims": ({"dp": 2, "cp": 2}, Dims(shard=("dp", "cp")), ""),
    "hybrid": ({"rep": 2, "dp": 2}, Dims(shard="dp", replicate="rep"), ""),
    "tensor": ({"dp": 2, "tp": 2}, Dims(shard="dp"), "tp"),
    "tensor outside": ({"tp": 2, "dp": 2}, Dims(shard="dp"), "tp"),
    "data parallel": ({"dp": 2, "tp": 2}, Dims(replicate="dp"), "tp"),
}
LARGE: dict[str, tuple[dict[str, int], Any, str]] = {
    "two dims and tensor": ({"dp": 2, "cp": 2, "tp": 2}, Dims(shard=("dp", "cp")), "tp"),
    "hybrid and tensor": ({"rep": 2, "dp": 2, "tp": 2}, Dims(shard="dp", replicate="rep"), "tp"),
    "all": ({"rep": 2, "dp": 2, "cp": 2}, Dims(shard=("dp", "cp"), replicate="rep"), ""),
}


def compare_with_torch(sizes: dict[str, int], dims: Any, tensor: str) -> None:
    mesh = named_mesh(**sizes)
    num_data = 1
    for name in (*dims.shard_names, *dims.replicate_names):
        num_data *= sizes[name]
    ours, theirs = tensorwise(mesh, tensor), tensorwise(mesh, tensor)
    shard_layers(sw.fully_shard, ours, mesh=mesh, dp_mesh_dims=dims)
    shard_layers(torch_fully_shard, theirs, mesh=mesh, dp_mesh_dims=torch_dims(dims))
    same_as_torch(ours, theirs, "at first")
    plain = make(Tensorwise)
    optimizers = [OPTIMIZERS["sgd"](m.parameters()) for m in (ours, theirs, plain)]
    for _ in range(2):
        for model in (ours, theirs):
            loss(model, inputs(mesh, dims), num_data).backward()
        same_as_torch(ours, theirs, "after a backward", exact=False)
        (plain(full(inputs(mesh, dims))).square().sum() / 8).backward()
        for n, p, q in pairs(ours, plain):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=n)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("case", list(CASES))
@on_ranks(4, timeout_s=150)
def test_placements_and_gradients(rank: int, world: int, case: str) -> None:
    compare_with_torch(*CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", list(LARGE))
@on_ranks(8, timeout_s=280)
def test_placements_and_gradients_on_three_dims(rank: int, world: int, case: str) -> None:
    compare_with_torch(*LARGE[case])


@on_ranks(2)
def test_one_dim_lives_on_the_given_mesh(rank: int, world: int) -> None:
    mesh = named_mesh(dp=world)
    model = replicated(make(Mlp), mesh)
    sw.fully_shard(model, mesh=mesh, dp_mesh_dims=torch_dims(Dims(shard="dp")))
    for name, p in model.named_parameters():
        assert p.device_mesh == mesh and p.placements == (Shard(0),), name


@on_ranks(2)
def test_modules_hold_what_they_were_given(rank: int, world: int) -> None:
    mesh = named_mesh(dp=world)
    model = tensorwise(mesh)
    sw.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(shard="dp"), reshard_after_forward=False)
    model(inputs(mesh, Dims(shard="dp")))
    held: Any = model.layers[0].weight
    assert isinstance(held, DTensor) and held.placements == (Replicate(),)
    model.reshard()
    assert model.layers[0].weight.placements == (Shard(0),)


@on_ranks(2)
def test_what_is_refused(rank: int, world: int) -> None:
    mesh = named_mesh(dp=world)
    with pytest.raises(ValueError, match="At least one of shard or replicate"):
        Dims()
    with pytest.raises(ValueError, match=r"'nope' not found in mesh\.mesh_dim_names"):
        sw.fully_shard(tensorwise(mesh), mesh=mesh, dp_mesh_dims=Dims(shard="nope"))
    with pytest.raises(ValueError, match="must have mesh_dim_names"):
        unnamed = init_device_mesh("cpu", (world,))
        sw.fully_shard(tensorwise(mesh), mesh=unnamed, dp_mesh_dims=Dims(shard="dp"))
    with pytest.raises(ValueError, match=r"layers\.0\.weight: Expected Replicate"):
        model = tensorwise(mesh)
        whole = model.layers[0].weight.detach().full_tensor()
        cut = distribute_tensor(whole, mesh, [Shard(0)])
        model.layers[0].register_parameter("weight", nn.Parameter(cut))
        sw.fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(shard="dp"))
    with pytest.raises(ValueError, match=r"must be DTensors.*'layers\.0\.weight'"):
        sw.fully_shard(make(Tensorwise), mesh=mesh, dp_mesh_dims=Dims(shard="dp"))
    with pytest.raises(ValueError, match="nothing to shard"):
        sw.fully_shard(
            tensorwise(mesh), mesh=mesh, dp_mesh_dims=Dims(replicate="dp"), strategy="zero3"
        )


@on_ranks(4)
def test_meshes_given_plainly(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"1D or 2D DeviceMesh.*dp_mesh_dims"):
        sw.fully_shard(make(Mlp), mesh=named_mesh(a=1, b=2, c=2))
    with pytest.raises(
        AssertionError, match="Please init the 2D mesh for HSDP with mesh_dim_names"
    ):
        sw.fully_shard(make(Mlp), mesh=init_device_mesh("cpu", (2, 2)))


@on_ranks(4)
def test_a_mesh_from_groups(rank: int, world: int) -> None:
    usual = named_mesh(replicate=2, shard=2)
    groups = usual.get_all_groups()
    mesh = DeviceMesh.from_group(groups, "cpu", usual.mesh, mesh_dim_names=("replicate", "shard"))
    models = [shard_layers(sw.fully_shard, make(Mlp), mesh=m) for m in (mesh, usual)]
    for model in models:
        loss_of(model(batch(Mlp, 0, rank))).backward()
    for n, p, q in pairs(*models):
        assert torch.equal(local(p.grad), local(q.grad)), n


@on_ranks(4)
def test_smaller_worlds_on_slices(rank: int, world: int) -> None:
    """`reshard_after_forward=int` on a mesh without names, and on one of two slices."""
    plain = make(Mlp)
    for mesh in (init_device_mesh("cpu", (4,)), named_mesh(pp=1, dp=4)["dp"]):
        model = shard_layers(sw.fully_shard, make(Mlp), mesh=mesh, reshard_after_forward=2)
        x = batch(Mlp, 0, 0)
        loss_of(model(x)).backward()
        plain.zero_grad()
        loss_of(plain(x)).backward()
        for n, p, q in pairs(model, plain):
            torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=n)
