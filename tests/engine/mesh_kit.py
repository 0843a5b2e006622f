"""Meshes of several dims, and models whose parameters are DTensors on some of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from engine_kit import local, make, same
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


@functools.cache
def named_mesh(**dims: int) -> DeviceMesh:
    """A mesh by names and sizes. Cached: process groups live as long as the rank process."""
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


class Ffn(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Two tensor parallel blocks, a plain norm between them; dims that do not divide."""

    features = 3

    def __init__(self, hidden: int = 17) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Ffn(3, hidden) for _ in range(2))
        self.norm = nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(x + layer(x))
        return x


def parallel(model: nn.Module, mesh: DeviceMesh) -> Any:
    """Column and row parallel layers over `mesh`."""
    for layer in model.layers:
        plan: dict[str, Any] = {
            "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    return model


def stack(mesh: DeviceMesh, hidden: int = 17) -> Any:
    return parallel(make(lambda: Stack(hidden)), mesh)


def shard_layers(fully_shard: Any, model: nn.Module, **options: Any) -> Any:
    """Each layer a unit, the rest the root's."""
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def torch_fully_shard(*args: Any, **kwargs: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(*args, **kwargs)


def replicated(model: nn.Module, mesh: DeviceMesh) -> Any:
    """All parameters as DTensors that are replicated over all dims."""

    def spread(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, p in list(module._parameters.items()):
            if p is not None and not isinstance(p, DTensor):
                whole = distribute_tensor(p.detach(), mesh, [Replicate()] * mesh.ndim)
                module.register_parameter(key, nn.Parameter(whole))

    return distribute_module(model, mesh, spread)


def pairs(ours: nn.Module, theirs: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    expected = dict(theirs.named_parameters())
    assert list(dict(ours.named_parameters())) == list(expected)
    for name, p in ours.named_parameters():
        yield name, p, expected[name]


def same_as_torch(ours: nn.Module, theirs: nn.Module, what: str, *, exact: bool = True) -> None:
    """Mesh, placements, shape, local parts of parameters and gradients."""
    for name, p, q in pairs(ours, theirs):
        assert p.device_mesh == q.device_mesh, f"{what}: {name} lies on {p.device_mesh}"
        assert p.device_mesh.mesh_dim_names == q.device_mesh.mesh_dim_names
        assert (p.placements, p.shape, p.stride()) == (q.placements, q.shape, q.stride()), name
        same(local(p), local(q), f"{what}: {name}", exact=exact)
        assert (p.grad is None) == (q.grad is None), f"{what}: gradient of {name}"
        if p.grad is not None:
            assert p.grad.placements == p.placements
            same(local(p.grad), local(q.grad), f"{what}: gradient of {name}", exact=exact)
