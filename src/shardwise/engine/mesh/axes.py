"""From a `DeviceMesh` and a strategy to the two axes that the engine works with.

mesh dims        strategy        shard axis          replicate axis     placements of a parameter
1 (any name)     sharding        the dim             -                  (Shard(d),)
1 (any name)     no_shard        -                   the dim            (Replicate(),)
2                sharding        dim 1               dim 0              (Replicate(), Shard(d))
2                no_shard        -                   both, flattened    (Replicate(), Replicate())
2                splits replicas dim 1               dim 0              (_StridedShard(d), Shard(d))

A strategy that splits replicas cuts each shard once more over dim 0. The shard axis cuts first, so
that a rank's rows are a part of its shard's: torch's strided shard.

With `dp_mesh_dims` the mesh may have any dims: the named ones (several act as one) take the roles,
and parameters are DTensors over all of them (`spread`). Otherwise the mesh holds data parallel dims
only; parameters that are DTensors lie on other slices of the same parent mesh.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise._torch_compat import flattened_mesh, joined_mesh, strided_shard
from shardwise.comm.transport import Axis
from shardwise.engine.mesh.rows import RowShard
from shardwise.layout import Cuts, DataParallelMeshDims, Lifetime, Strategy, strategy_named


@dataclass(frozen=True, slots=True)
class ShardMesh:
    """A data parallel mesh with the roles of its dims; `spmd` and `dims` are what `dp_mesh_dims`
    named: the mesh with all dims, and which of them these are. `splits_replicas`: the registered
    parameters are cut over the replicate axis too.
    """

    mesh: DeviceMesh
    shard: Axis
    replicate: Axis
    device: torch.device
    is_sharded: bool = True
    spmd: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None
    splits_replicas: bool = False

    def placements(self, shard_dim: int, own: RowShard | None = None) -> tuple[Placement, ...]:
        """DTensor placements of a parameter that is cut along `shard_dim`, or in its `own` way."""
        if not self.is_sharded:
            return (Replicate(),) * self.mesh.ndim
        if self.splits_replicas:
            parts = self.shard.size
            cut_last = Shard(shard_dim) if parts == 1 else strided_shard(shard_dim, parts)
            return (cut_last, Shard(shard_dim))
        return (Replicate(),) * (self.mesh.ndim - 1) + (own or Shard(shard_dim),)

    def own_rows(self, cuts: Cuts) -> tuple[int, int]:
        """First row and number of rows of this rank's registered part."""
        start, size = cuts.start(self.shard.rank), cuts.size(self.shard.rank)
        if not self.splits_replicas:
            return start, size
        part = Cuts.even(size, self.replicate.size)
        return start + part.start(self.replicate.rank), part.size(self.replicate.rank)

    @property
    def holders(self) -> tuple[Axis, ...]:
        """The axes over whose ranks a registered parameter is cut."""
        axes = self.axes if self.splits_replicas else (self.shard,)
        return tuple(axis for axis in axes if axis.size > 1)

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Parameters of a unit that share these may share a bucket."""
        return self.shard, self.replicate

    @property
    def world(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.shard.size * self.replicate.size


def default_mesh() -> DeviceMesh:
    """One dim over all ranks, on the accelerator if there is one. Starts the process group from
    the environment.
    """
    if not dist.is_available():
        raise RuntimeError("this build of torch has no torch.distributed; install one that has it")
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise RuntimeError(
                "no process group: start the script with torchrun (torchrun --nproc-per-node 2 "
                "SCRIPT), or call torch.distributed.init_process_group() before fully_shard"
            )
        dist.init_process_group()
    return init_device_mesh(default_device(), (dist.get_world_size(),))


def default_device() -> str:
    """The accelerator's type if there is one."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator else "cpu"


def resolve_mesh(
    mesh: DeviceMesh | None, strategy: Strategy, dims: DataParallelMeshDims | None = None
) -> ShardMesh:
    """Roles of the dims of `mesh` (the default mesh if None) under a strategy."""
    mesh = mesh if mesh is not None else default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh: expected a DeviceMesh (torch.distributed.device_mesh), found "
            f"{type(mesh).__name__}"
        )
    if dims is not None:
        _check_names(mesh, dims)
        shard, replicate = dims.shard_names, dims.replicate_names
        _check_hybrid(strategy, bool(shard and replicate))
        if strategy.splits_replicas:
            raise NotImplementedError(
                f"{strategy.name} with dp_mesh_dims: a parameter that is a DTensor on all dims of "
                "the mesh cannot be cut over the replicate dims too yet; use hybrid_shard"
            )
        return replace(_named_roles(mesh, shard, replicate, strategy), spmd=mesh, dims=dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh, dims (shard) or (replicate, shard), but "
            f"found {mesh.ndim} dims {mesh.mesh_dim_names}; pass the slice of the data parallel "
            "dims, e.g. mesh['replicate', 'shard'], or the whole mesh with dp_mesh_dims="
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    _check_hybrid(strategy, mesh.ndim == 2)
    return roles_of(mesh, strategy)


def roles_of(mesh: DeviceMesh, strategy: Strategy) -> ShardMesh:
    """The table of the module docstring, for a mesh of 1 or 2 data parallel dims."""
    names = (*(mesh.mesh_dim_names or ("shard",)), "")
    device = _device_of(mesh)
    if strategy.shard is None:
        whole = mesh if mesh.ndim == 1 else flattened_mesh(mesh)
        return ShardMesh(mesh, no_axis("shard"), _axis(whole, 0, "replicate"), device, False)
    if mesh.ndim == 1:
        return ShardMesh(mesh, _axis(mesh, 0, names[0]), no_axis("replicate"), device)
    replicate = _axis(mesh, 0, names[0])
    splits = strategy.splits_replicas and replicate.size > 1
    return ShardMesh(mesh, _axis(mesh, 1, names[1]), replicate, device, splits_replicas=splits)


def whole_roles(mesh: ShardMesh) -> ShardMesh:
    """The same ranks with nothing sharded: parameters without dims cannot be cut, so every rank
    holds them and their gradients are averaged.
    """
    return replace(roles_of(mesh.mesh, strategy_named("no_shard")), spmd=mesh.spmd, dims=mesh.dims)


def _named_roles(
    mesh: DeviceMesh, shard: tuple[str, ...], replicate: tuple[str, ...], strategy: Strategy
) -> ShardMesh:
    """Roles of named dims; several of one role act as one dim."""

    def merged(names: tuple[str, ...]) -> DeviceMesh:
        return mesh[names[0]] if len(names) == 1 else flattened_mesh(mesh[names], "_".join(names))

    if shard and replicate:
        return roles_of(joined_mesh([merged(replicate), merged(shard)]), strategy)
    if not shard and strategy.shard is not None:
        raise ValueError(
            f"dp_mesh_dims names replicate dims {replicate} only, so there is nothing to shard "
            f"over; use strategy='no_shard' (the default then), found {strategy.name!r}"
        )
    return roles_of(merged(shard or replicate), strategy)


def _check_names(mesh: DeviceMesh, dims: DataParallelMeshDims) -> None:
    if mesh.mesh_dim_names is None:
        raise ValueError(
            "mesh must have mesh_dim_names when dp_mesh_dims is provided; pass them to "
            "init_device_mesh"
        )
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in mesh.mesh_dim_names:
            raise ValueError(
                f"dp_mesh_dims: dim name {name!r} not found in mesh.mesh_dim_names "
                f"{mesh.mesh_dim_names}"
            )


def _check_hybrid(strategy: Strategy, has_both: bool) -> None:
    if strategy.is_hybrid and not has_both:
        raise ValueError(
            f"{strategy.name} needs a mesh of 2 dims (replicate, shard), found 1; use "
            "init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', "
            "'shard')), or full_shard"
        )


def _axis(mesh: DeviceMesh, dim: int, name: str) -> Axis:
    group = mesh.get_group(dim)
    return Axis(name, tuple(dist.get_process_group_ranks(group)), mesh.get_local_rank(dim), group)


def no_axis(name: str) -> Axis:
    """An axis of this rank alone."""
    return Axis(name, (dist.get_rank(),), 0, None)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type in ("cpu", "meta"):
        return torch.device(mesh.device_type)
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


def default_strategy(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None) -> str:
    """What the data parallel dims of a mesh are made for."""
    if dims is not None:
        if not dims.shard_names:
            return "no_shard"
        return "hybrid_shard" if dims.replicate_names else "full_shard"
    return "hybrid_shard" if isinstance(mesh, DeviceMesh) and mesh.ndim == 2 else "full_shard"


def strategy_for(
    strategy: str | Strategy | None, default: str, reshard_after_forward: bool | int | None
) -> Strategy:
    """The strategy that a call asks for; `reshard_after_forward` is another way to name points of
    the same space.
    """
    if strategy is None and default == "no_shard":
        return strategy_named(default)  # nothing is ever gathered or released
    if strategy is None:
        return with_reshard(strategy_named(default), reshard_after_forward)
    chosen = strategy_named(strategy)
    if reshard_after_forward is None or (
        reshard_after_forward is True and chosen.lifetime is Lifetime.USE
    ):
        return chosen
    raise ValueError(
        f"strategy={chosen.name!r} and reshard_after_forward={reshard_after_forward!r} both say "
        f"how long gathered "
        f"parameters live; drop one of them"
    )


def with_reshard(strategy: Strategy, reshard_after_forward: bool | int | None) -> Strategy:
    """FSDP2's values: True, None (the root's own unit is kept), False (kept until backward), int
    (smaller world).
    """
    if reshard_after_forward is None or reshard_after_forward is True:
        return strategy
    if reshard_after_forward is False:
        return strategy.with_lifetime(Lifetime.PASS)
    return strategy.with_lifetime(Lifetime.USE, forward_world=int(reshard_after_forward))


def regrouped_strategy(strategy: Strategy, mesh: ShardMesh) -> Strategy:
    """`forward_world` checked against the mesh; its extremes are the plain settings."""
    world = strategy.forward_world
    if world < 1 or mesh.shard.size % world:
        raise ValueError(
            f"reshard_after_forward={world} must be a factor of the {mesh.shard.size} ranks of "
            f"axis {mesh.shard.name!r}; choose one, or True or False"
        )
    if world == 1:
        return strategy.with_lifetime(Lifetime.PASS)
    return strategy.with_lifetime(Lifetime.USE, 0 if world == mesh.shard.size else world)
