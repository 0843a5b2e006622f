"""Where each parameter is cut: along which dim, and over which mesh.

`shard_placement_fn` may give a parameter another dim than 0, and another mesh than that of its
unit (experts that live on fewer ranks). A unit then has buckets on several meshes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.engine.mesh.axes import ShardMesh, resolve_mesh, roles_of, whole_roles
from shardwise.engine.mesh.rows import RowShard
from shardwise.layout import Strategy


@dataclass(frozen=True, slots=True)
class ShardPlacementResult:
    """What `shard_placement_fn` may return: a `Shard` (None for `Shard(0)`), and the data parallel
    mesh of 1 or 2 dims, as a `DeviceMesh` or as an object that has one as `.mesh` (torch's
    `FSDPMeshInfo`).
    """

    placement: Shard | None
    mesh_info: Any


class Place(NamedTuple):
    """Along which dim a parameter is cut, over which mesh; `own`: if not as torch.chunk cuts."""

    dim: int
    mesh: ShardMesh
    own: RowShard | None = None


PlacementFn = Callable[[nn.Parameter], Any]


class Placer:
    """Reads `shard_placement_fn` for the parameters of one call."""

    def __init__(self, fn: PlacementFn | None, mesh: ShardMesh, strategy: Strategy) -> None:
        self._fn = fn
        self._mesh = mesh
        self._strategy = strategy
        self._meshes: dict[int, tuple[Any, ShardMesh]] = {}  # by id; the object keeps the id alive

    def __call__(self, name: str, param: nn.Parameter) -> Place:
        found: Any = self._fn(param) if self._fn is not None else None
        mesh = self._mesh
        if hasattr(found, "mesh_info"):  # ours, or torch's class of the same name and fields
            mesh, found = self._mesh_of(name, found.mesh_info), found.placement
        if found is not None and not isinstance(found, Shard | RowShard):
            raise ValueError(
                f"{name}: shard_placement_fn must return Shard(dim), a RowShard, a "
                f"ShardPlacementResult or None, found {found!r}"
            )
        dim = 0 if found is None else found.dim
        positive = dim + param.ndim if dim < 0 else dim
        if not 0 <= positive < max(param.ndim, 1):
            raise AssertionError(
                f"Shard dim {dim} is invalid for {param.ndim}D tensor {name} of shape "
                f"{tuple(param.shape)}"
            )
        if not param.ndim:
            return Place(positive, whole_roles(mesh))
        own = found if isinstance(found, RowShard) else None
        if own is not None:
            _check_own(name, param, own, mesh)
            own = own if own.dim >= 0 else own.on(positive)
        return Place(positive, mesh, own)

    def _mesh_of(self, name: str, info: Any) -> ShardMesh:
        known = self._meshes.get(id(info))
        if known is None:
            known = self._meshes[id(info)] = (info, self._read(name, info))
        return known[1]

    def _read(self, name: str, info: Any) -> ShardMesh:
        dims = getattr(info, "dp_mesh_dims", None)
        if dims is not None:
            return resolve_mesh(info.spmd_mesh, self._strategy, dims)
        mesh = info if isinstance(info, DeviceMesh) else getattr(info, "mesh", None)
        if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2:
            raise ValueError(
                f"{name}: shard_placement_fn must give a DeviceMesh of 1 dim (shard) or 2 dims "
                f"(replicate, shard) as mesh_info, found {info!r}"
            )
        return roles_of(mesh, self._strategy)


def _check_own(name: str, param: nn.Parameter, own: RowShard, mesh: ShardMesh) -> None:
    """What has an own way to cut, and where."""
    if mesh.splits_replicas:
        raise NotImplementedError(
            f"{name}: {own} says where rows are cut over one axis, and hybrid_full_optimizer cuts "
            "over two; use hybrid_shard, or Shard(dim)"
        )
    if isinstance(param, DTensor):
        raise NotImplementedError(
            f"{name}: {own} is for plain parameters, and this one is a DTensor over "
            f"{param.device_mesh}; return Shard(dim)"
        )
    cuts = own.cuts(param.shape[own.dim], mesh.shard.size)
    if cuts.rows != param.shape[own.dim] or cuts.world != mesh.shard.size:
        raise ValueError(
            f"{name}: {own} cuts {cuts.rows} rows among {cuts.world} ranks, expected "
            f"{param.shape[own.dim]} rows among {mesh.shard.size}"
        )
