"""How one parameter lies over the ranks, sharded and gathered, where other parallelisms have a say.

The engine cuts, gathers and reduces a rank's *own part* of a parameter. For a plain parameter that
is the whole; for one that is a DTensor already (tensor or expert parallel) it is its local tensor,
and the modules get that back as the same DTensor while a unit runs. Three cases:

parameter                  mesh                sharded form                         gathered form
plain                      data parallel       (*data, )                            plain tensor
DTensor on other dims      data parallel       (*data, *its own) on both meshes     its own spec
DTensor on all dims        with dp_mesh_dims   its own, data dims sharded           its own spec

Where data and tensor parallelism cut the same dim, the tensor axis cuts first: the data dim's
placement is then a strided shard, whose `split_factor` is the number of parts that were there.
Placements are FSDP2's, so its checkpoints fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwise._torch_compat import (
    joined_mesh,
    local_of,
    make_spec,
    new_dtensor,
    spec_of,
    strided_shard,
    waited_for,
)
from shardwise.engine.mesh.axes import ShardMesh
from shardwise.engine.mesh.rows import RowShard, cuts_dim, part_of
from shardwise.errors import EngineError


@dataclass(frozen=True, slots=True)
class Spread:
    """See the module docstring. `whole` is the spec of the gathered form, None for a plain tensor;
    `own_shape` the shape of this rank's part of that; `data_dims` its data parallel dims.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    own_shape: tuple[int, ...]
    whole: Any = None
    data_dims: frozenset[int] = frozenset()

    @property
    def own(self) -> RowShard | None:
        """How it is cut, where not as torch.chunk does."""
        return next((p for p in self.placements if isinstance(p, RowShard)), None)

    def sharded_spec(self, dtype: torch.dtype) -> Any:
        return make_spec(self.mesh, self.placements, self.shape, self.stride, dtype)

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """What the modules hold, over this rank's own part."""
        if self.whole is None:
            return own
        spec = make_spec(self.whole.mesh, self.whole.placements, self.shape, self.stride, own.dtype)
        return new_dtensor(DTensor, own, spec)

    def is_gathered_form(self, tensor: DTensor) -> bool:
        """True when `tensor` lies like the gathered form."""
        return (
            self.whole is not None
            and tensor.placements == self.whole.placements
            and tensor.device_mesh == self.whole.mesh
        )

    def own_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's own part of a plain tensor of the full shape."""
        if self.whole is None:
            return tensor
        return part_of(tensor, self.whole.mesh, self.whole.placements)

    def own_gradient(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """This rank's own part of a gradient. One that arrives with other placements on the tensor
        axis (replicated, a partial sum) is brought to the parameter's, a collective there; on
        data parallel dims it stays as it is, for the reduction.
        """
        if self.whole is None:
            return grad
        if not isinstance(grad, DTensor):
            raise EngineError(
                f"{name}: expected its gradient to be a DTensor over {self.whole.mesh}, like the "
                f"parameter, found a plain tensor of shape {tuple(grad.shape)}"
            )
        wanted = tuple(
            found if i in self.data_dims and isinstance(found, (Partial, Replicate)) else placed
            for i, (found, placed) in enumerate(
                zip(grad.placements, self.whole.placements, strict=True)
            )
        )
        if wanted != tuple(grad.placements):
            grad = grad.redistribute(placements=wanted)
        return waited_for(local_of(grad))


def spread_of(
    name: str, param: torch.Tensor, shard_dim: int, mesh: ShardMesh, own: RowShard | None = None
) -> Spread:
    """The spread of a parameter that is about to be cut along `shard_dim`, or in its `own` way."""
    if mesh.spmd is not None:
        return _on_all_dims(name, param, shard_dim, mesh)
    if isinstance(param, DTensor):
        return _beside(name, param, shard_dim, mesh)
    return plain_spread(param.shape, shard_dim, mesh, own)


def plain_spread(
    shape: torch.Size, shard_dim: int, mesh: ShardMesh, own: RowShard | None = None
) -> Spread:
    """Of a plain parameter."""
    stride = torch.empty(shape, device="meta").stride()
    return Spread(mesh.mesh, mesh.placements(shard_dim, own), shape, stride, tuple(shape))


def _beside(name: str, param: DTensor, shard_dim: int, mesh: ShardMesh) -> Spread:
    """A DTensor over other dims of the parent mesh."""
    whole = spec_of(param)
    try:
        joined = joined_mesh([mesh.mesh, whole.mesh])
    except RuntimeError as error:
        raise ValueError(
            f"{name}: is a DTensor over the mesh {whole.mesh}, and fully_shard got the mesh "
            f"{mesh.mesh}; expected two slices of one parent mesh without a common dim "
            "(mesh['tp'] for the one, mesh['dp'] for the other). A parameter that lies on the "
            "data parallel dims too needs dp_mesh_dims="
        ) from error
    data = list(mesh.placements(shard_dim))
    if mesh.is_sharded:
        num_parts = _num_parts(whole.mesh, whole.placements, shard_dim)
        if mesh.splits_replicas and num_parts > 1:
            raise NotImplementedError(
                f"{name}: its dim {shard_dim} is cut over {whole.mesh} already; to cut it over the "
                f"axes {mesh.shard.name!r} and {mesh.replicate.name!r} both is not there yet. Use "
                "hybrid_shard, or another dim (shard_placement_fn)"
            )
        data[-1] = _cut(shard_dim, num_parts)
    return Spread(
        joined,
        (*data, *whole.placements),
        param.shape,
        param.stride(),
        tuple(local_of(param).shape),
        whole,
    )


def _on_all_dims(name: str, param: torch.Tensor, shard_dim: int, mesh: ShardMesh) -> Spread:
    """A DTensor over all dims of the mesh that `dp_mesh_dims` names some of."""
    spmd, dims = mesh.spmd, mesh.dims
    assert spmd is not None and dims is not None and spmd.mesh_dim_names is not None
    if not isinstance(param, DTensor):
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full mesh "
            f"(e.g. via distribute_module). Got a plain tensor for parameter {name!r}"
        )
    if param.device_mesh != spmd:
        raise ValueError(
            f"{name}: expected a DTensor on the mesh that was passed to fully_shard, {spmd}, found "
            f"one on {param.device_mesh}"
        )
    whole = spec_of(param)
    shards = [spmd.mesh_dim_names.index(n) for n in dims.shard_names]
    data_dims = frozenset([*shards, *(spmd.mesh_dim_names.index(n) for n in dims.replicate_names)])
    for i in sorted(data_dims):
        if not whole.placements[i].is_replicate():
            raise ValueError(
                f"{name}: Expected Replicate() on the data parallel dim "
                f"{spmd.mesh_dim_names[i]!r} (index {i}), found {whole.placements[i]}; fully_shard "
                "is to shard it there"
            )
    placements = list(whole.placements)
    for i in shards if mesh.is_sharded else ():
        num_parts = _num_parts(spmd, whole.placements, shard_dim, after=i)
        placements[i] = _cut(shard_dim, num_parts)
    spread = Spread(
        spmd,
        tuple(placements),
        param.shape,
        param.stride(),
        tuple(local_of(param).shape),
        whole,
        data_dims,
    )
    return _merged(spread, mesh) if len(shards) > 1 and mesh.is_sharded else spread


def _merged(spread: Spread, mesh: ShardMesh) -> Spread:
    """Several shard dims act as one: the sharded form lies on a mesh that has them merged."""
    spmd, dims = spread.mesh, mesh.dims
    assert dims is not None
    meshes: list[DeviceMesh] = []
    placements: list[Placement] = []
    for i, name in enumerate(spmd.mesh_dim_names or ()):
        if name == dims.shard_names[0]:
            meshes.append(mesh.mesh)
            placements += [Replicate()] * (mesh.mesh.ndim - 1) + [spread.placements[i]]
        elif i not in spread.data_dims:
            meshes.append(spmd[name])
            placements.append(spread.placements[i])
    return replace(spread, mesh=joined_mesh(meshes), placements=tuple(placements))


def _cut(dim: int, num_parts: int) -> Placement:
    return Shard(dim) if num_parts == 1 else strided_shard(dim, num_parts)


def _num_parts(
    mesh: DeviceMesh, placements: tuple[Placement, ...], dim: int, after: int = -1
) -> int:
    """Into how many parts the mesh dims after `after` cut a dim."""
    number = 1
    for i, placement in enumerate(placements):
        if i > after and cuts_dim(placement) == dim:
            number *= mesh.size(i)
    return number
