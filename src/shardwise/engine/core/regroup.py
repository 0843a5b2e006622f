"""`reshard_after_forward=int`: between forward and backward, shards over a smaller world.

After a forward every rank keeps, instead of nothing, its part of the full parameters among a group
of `world` neighbours; the backward gathers inside that group, which is often one host. Costs
1/`world` of the gathered bytes. Shared memory, where one host is all there is, gathers from the
shards themselves: a neighbour that has not run the unit (a branch) has kept no part of it. Idea:
hpZ of ZeRO++ (Wang et al. 2023, arXiv 2306.10209), FSDP2's integer setting.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch_compat import unflattened_mesh
from shardwise.comm.choose import ANYWHERE, open_transport
from shardwise.comm.phases import Wire
from shardwise.comm.transport import Bucket, Handle, Transport
from shardwise.engine.core.bucket import BucketState
from shardwise.engine.core.parameter import ShardedParam, make_parameter
from shardwise.engine.mesh.axes import ShardMesh, roles_of
from shardwise.engine.mesh.spread import plain_spread
from shardwise.layout import layout_bucket, strategy_named

_GROUPED: weakref.WeakKeyDictionary[DeviceMesh, dict[int, DeviceMesh]] = weakref.WeakKeyDictionary()


def grouped_mesh(mesh: ShardMesh, world: int) -> ShardMesh:
    """The inner dim of a mesh whose shard axis is cut into groups of `world` ranks."""
    known = _GROUPED.setdefault(mesh.mesh, {})
    if world not in known:
        known[world] = _grouped(mesh.mesh, mesh.mesh.size(mesh.mesh.ndim - 1) // world, world)
    return roles_of(known[world], strategy_named("full_shard"))


def _grouped(mesh: DeviceMesh, num_groups: int, world: int) -> DeviceMesh:
    names = (f"outer_of_{world}", f"inner_{world}")
    if mesh.mesh_dim_names is not None:
        return unflattened_mesh(mesh, mesh.ndim - 1, (num_groups, world), names)[names[1]]
    # A mesh without names is no slice, so its ranks are all there are.
    return DeviceMesh(mesh.device_type, mesh.mesh.view(num_groups, world), mesh_dim_names=names)[
        names[1]
    ]


@dataclass(frozen=True, slots=True)
class _Part:
    """A bucket, and the smaller-world one that stands in for it."""

    state: BucketState
    bucket: Bucket
    mesh: ShardMesh
    transport: Transport


class Regrouped:
    """The smaller-world shards of one unit."""

    def __init__(
        self, buckets: list[BucketState], world: int, open_on: Callable[[ShardMesh], Transport]
    ) -> None:
        self.is_kept = False
        self._parts = [
            _regroup(b, world, open_on) for b in buckets if b.regroups and b.layout.world > world
        ]
        ordered = [part for part in self._parts if part.state.transport.is_ordered]
        self._gathered = ordered  # in the group; the others from their shards
        self.wires = list(dict.fromkeys(Wire.of(part.transport) for part in ordered))

    def holds(self, state: BucketState) -> bool:
        """True when the backward gathers this bucket inside the group."""
        return any(part.state is state for part in self._gathered)

    @torch.no_grad()
    def keep(self) -> None:
        """Copy this rank's parts out of the full parameters, and register them."""
        for part in self._parts:
            for i, param in enumerate(part.state.params):
                p, rank = part.bucket.layout.params[i], part.mesh.shard.rank
                _own_rows(part, i).copy_(p.rows_of(param.full_own, rank))
        self.is_kept = True

    def register(self) -> None:
        for part in self._parts:
            part.state.register_between()

    def gather(self) -> list[Handle]:
        """Fill the full parameters from the group."""
        handles = []
        for part in self._gathered:
            part.state.open_storage()
            handles.append(part.transport.gather(part.bucket, part.bucket.buffer, part.state.out))
            part.state.set_gathered_versions()
        return handles


def _regroup(state: BucketState, world: int, open_on: Callable[[ShardMesh], Transport]) -> _Part:
    """The smaller-world bucket of a bucket."""
    mesh = grouped_mesh(state.mesh, world)
    if not state.transport.is_ordered:  # ranks come here by themselves: nothing that others share
        transport = open_transport(ANYWHERE, mesh.shard, mesh.replicate, mesh.device)
    else:
        transport = open_on(mesh)
    layout = layout_bucket(
        [replace(p.spec, dtype=state.layout.gather_dtype, cuts=None) for p in state.layout.params],
        gather_dtype=state.layout.gather_dtype,
        reduce_dtype=state.layout.reduce_dtype,
        world=mesh.shard.size,
    )
    bucket = transport.attach(f"{state.name}/{mesh.shard.size}", layout, mesh.device)
    part = _Part(state, bucket, mesh, transport)
    for i, param in enumerate(state.params):
        param.between = _between(part, i, param)
    state.between = [p.between for p in state.params if p.between is not None]
    return part


def _between(part: _Part, index: int, param: ShardedParam) -> nn.Parameter | None:
    """What modules hold meanwhile. DTensors over other axes have no such form: their modules hold
    the usual shards, though the backward gathers from the group.
    """
    if param.spread.whole is not None:
        return None
    dim = param.layout.spec.shard_dim
    spread = plain_spread(param.spread.shape, dim, part.mesh)
    flag = param.sharded.requires_grad
    between = make_parameter(_own_rows(part, index), spread, param.name, None, flag)
    assert param.belongings is not None
    param.belongings.give(between)
    return between


def _own_rows(part: _Part, index: int) -> torch.Tensor:
    """This rank's part of a parameter in the smaller-world buffer."""
    layout, rank = part.bucket.layout, part.mesh.shard.rank
    p, at = layout.params[index], layout.shard_offsets(rank)[index]
    return part.state.typed(p.part_in(part.bucket.buffer, at, rank))
