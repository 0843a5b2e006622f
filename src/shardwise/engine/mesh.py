"""From a `DeviceMesh` and a strategy to the two axes that the engine works with, and to DTensor
placements.

mesh dims        strategy        shard axis          replicate axis     placements of a parameter
1 (any name)     sharding        the dim             -                  (Shard(d),)
1 (any name)     no_shard        -                   the dim            (Replicate(),)
2                sharding        dim 1               dim 0              (Replicate(), Shard(d))
2                no_shard        -                   both, flattened    (Replicate(), Replicate())
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise.comm.transport import Axis
from shardwise.layout import Lifetime, Strategy, strategy_named


@dataclass(frozen=True, slots=True)
class ShardMesh:
    """A mesh with the roles of its dims."""

    mesh: DeviceMesh
    shard: Axis
    replicate: Axis
    device: torch.device
    is_sharded: bool = True

    def placements(self, shard_dim: int) -> tuple[Placement, ...]:
        """DTensor placements of a parameter that is cut along `shard_dim`."""
        if not self.is_sharded:
            return (Replicate(),) * self.mesh.ndim
        return (Replicate(),) * (self.mesh.ndim - 1) + (Shard(shard_dim),)

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
    device_type = (
        accelerator.type if (accelerator := torch.accelerator.current_accelerator()) else "cpu"
    )
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise RuntimeError(
                "no process group: start the script with torchrun (torchrun --nproc-per-node 2 "
                "SCRIPT), or call torch.distributed.init_process_group() before fully_shard"
            )
        dist.init_process_group()
    return init_device_mesh(device_type, (dist.get_world_size(),))


def resolve_mesh(mesh: DeviceMesh | None, strategy: Strategy) -> ShardMesh:
    """Roles of the dims of `mesh` (the default mesh if None) under a strategy."""
    mesh = mesh if mesh is not None else default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh: expected a DeviceMesh (torch.distributed.device_mesh), found "
            f"{type(mesh).__name__}"
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a mesh of 1 dim (shard) or 2 dims (replicate, shard), found "
            f"{mesh.ndim} dims "
            f"{mesh.mesh_dim_names}; pass a slice, e.g. mesh['replicate', 'shard']"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    if strategy.name == "hybrid_shard" and mesh.ndim != 2:
        raise ValueError(
            "hybrid_shard needs a mesh of 2 dims (replicate, shard), found 1; use "
            "init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', "
            "'shard')), or full_shard"
        )
    names = (*(mesh.mesh_dim_names or ("shard",)), "")
    device = _device_of(mesh)
    if strategy.shard is None:
        whole = mesh if mesh.ndim == 1 else mesh._flatten()
        return ShardMesh(mesh, _no_axis("shard"), _axis(whole, 0, "replicate"), device, False)
    if mesh.ndim == 1:
        return ShardMesh(mesh, _axis(mesh, 0, names[0]), _no_axis("replicate"), device)
    return ShardMesh(mesh, _axis(mesh, 1, names[1]), _axis(mesh, 0, names[0]), device)


def _axis(mesh: DeviceMesh, dim: int, name: str) -> Axis:
    group = mesh.get_group(dim)
    return Axis(name, tuple(dist.get_process_group_ranks(group)), mesh.get_local_rank(dim), group)


def _no_axis(name: str) -> Axis:
    return Axis(name, (dist.get_rank(),), 0, None)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type in ("cpu", "meta"):
        return torch.device(mesh.device_type)
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


def strategy_for(
    strategy: str | Strategy | None, mesh_dims: int, reshard_after_forward: bool | int | None
) -> Strategy:
    """The strategy that a call asks for; `reshard_after_forward` is another way to name points of
    the same space.
    """
    default = "hybrid_shard" if mesh_dims == 2 else "full_shard"
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
