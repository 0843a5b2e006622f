"""`reshard_after_forward=int`: between forward and backward, shards over a smaller world.

After a forward every rank keeps, instead of nothing, its part of the full parameters among a group
of `world` neighbours; the backward gathers inside that group, which is often one host. Costs
1/`world` of the gathered bytes. Idea: hpZ of ZeRO++ (Wang et al. 2023, arXiv 2306.10209), FSDP2's
integer setting.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.transport import Bucket, Handle, Transport
from shardwise.engine.bucket import BucketState
from shardwise.engine.mesh import ShardMesh, resolve_mesh
from shardwise.engine.param import make_parameter
from shardwise.engine.wire import Wire
from shardwise.layout import layout_bucket, strategy_named

_GROUPED: weakref.WeakKeyDictionary[DeviceMesh, dict[int, DeviceMesh]] = weakref.WeakKeyDictionary()


def grouped_mesh(mesh: ShardMesh, world: int) -> ShardMesh:
    """The inner dim of a mesh whose shard axis is cut into groups of `world` ranks."""
    known = _GROUPED.setdefault(mesh.mesh, {})
    if world not in known:
        ranks = mesh.mesh.mesh
        known[world] = DeviceMesh(
            mesh.mesh.device_type,
            ranks.view(*ranks.shape[:-1], ranks.shape[-1] // world, world),
            mesh_dim_names=(*(f"outer{i}" for i in range(ranks.ndim)), "inner"),
        )
    return resolve_mesh(known[world]["inner"], strategy_named("full_shard"))


class Regrouped:
    """The smaller-world shards of one unit."""

    def __init__(self, buckets: list[BucketState], mesh: ShardMesh, transport: Transport) -> None:
        self.mesh = mesh
        self.transport = transport
        self.wire = Wire.of(transport)
        self.is_kept = False
        self._pairs: list[tuple[BucketState, Bucket]] = []
        for state in buckets:
            if state.layout.world == 1:
                continue
            layout = layout_bucket(
                [
                    replace(p.spec, dtype=state.layout.gather_dtype, cuts=None)
                    for p in state.layout.params
                ],
                gather_dtype=state.layout.gather_dtype,
                reduce_dtype=state.layout.reduce_dtype,
                world=mesh.shard.size,
            )
            bucket = transport.attach(f"{state.name}/{mesh.shard.size}", layout, mesh.device)
            self._pairs.append((state, bucket))
            self._register_between(state, bucket)

    def _register_between(self, state: BucketState, bucket: Bucket) -> None:
        rank = self.mesh.shard.rank
        offsets = bucket.layout.shard_offsets(rank)
        for param, p, at in zip(state.params, bucket.layout.params, offsets, strict=True):
            local = bucket.buffer[at : at + p.shard_numel(rank)].view(p.shard_shape(rank))
            param.between = make_parameter(local, p, self.mesh, param.name, None)

    @torch.no_grad()
    def keep(self) -> None:
        """Copy this rank's parts out of the full parameters, and register them."""
        rank = self.mesh.shard.rank
        for state, bucket in self._pairs:
            for param, p in zip(state.params, bucket.layout.params, strict=True):
                between: nn.Parameter | None = param.between
                assert between is not None
                part = param.full.detach().narrow(
                    p.spec.shard_dim, p.cuts.start(rank), p.cuts.size(rank)
                )
                between._local_tensor.copy_(part)  # type: ignore[attr-defined]
        self.is_kept = True

    def register(self) -> None:
        for state, _ in self._pairs:
            for param in state.params:
                for parameters, name in param.slots:
                    parameters[name] = param.between

    def gather(self) -> list[Handle]:
        """Fill the full parameters from the group."""
        handles = []
        for state, bucket in self._pairs:
            state.open_storage()
            handles.append(self.transport.gather(bucket, bucket.buffer, state.out))
            state.set_gathered_versions()
        return handles
