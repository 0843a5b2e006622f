"""Stages: the buffers in which the parameters of a bucket lie, from what is registered to the full
form. All ranks' parts of one fill the next, over the axis of the stage.

    full_shard, zero ...    shard --gather(shard)--> full
    hybrid_full_optimizer   home --gather(replicate)--> middle --gather(shard)--> full
    no_shard                the whole, which is the full form itself
    reshard = int           ... full --cut--> part --gather(group)--> full, from a forward to its
                            backward

    home      this rank's part of its shard: registered, like gradient and optimizer state
    middle    the shard, in the gather dtype. Brought up to date at the beginning of a forward that
              follows a write, by all ranks alike, and nowhere else: a backward uses the values of
              its forward, and peers that read shards at any time do so behind one fence
    part      of the full parameters among a group of neighbours, which is often one host. Where
              one host is all there is (peers read shards at any time), the backward gathers from
              the shards: a neighbour that has not run the unit has kept no part of it

A reduction walks back: full gradients become this rank's rows of the last stage, these its rows of
the one before. Ideas: HFSDP of Megatron-FSDP; hpZ of ZeRO++ (Wang et al. 2023, arXiv 2306.10209),
FSDP2's integer setting.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch_compat import unflattened_mesh
from shardwise.comm.choose import ANYWHERE, open_transport
from shardwise.comm.transport import DONE, Bucket, Handle, Transport
from shardwise.engine.core.parameter import ShardedParam, make_parameter
from shardwise.engine.mesh.axes import ShardMesh, roles_of
from shardwise.engine.mesh.spread import plain_spread
from shardwise.layout import (
    BucketLayout,
    ReduceLayout,
    home_layout,
    home_reduce,
    layout_bucket,
    strategy_named,
)

if TYPE_CHECKING:
    from shardwise.engine.core.bucket import BucketState
    from shardwise.engine.core.unit import Unit


class Stage:
    """One buffer over one axis. `rank` is this process's place on it; `version` the mark's count
    when the buffer was filled from the stage before, -1: never.
    """

    def __init__(self, name: str, layout: BucketLayout, transport: Transport, rank: int) -> None:
        self.name, self.layout, self.transport, self.rank = name, layout, transport, rank
        self.bucket: Bucket | None = None  # None while the parameters are on the meta device
        self.version = -1
        self.is_on_host = False  # though the device computes

    def allocate(self, device: torch.device) -> Bucket:
        self.bucket = self.transport.attach(self.name, self.layout, device)
        return self.bucket

    def rows(self, index: int) -> torch.Tensor:
        """This rank's part of a parameter, as a view; what lies in buffers is real."""
        assert self.bucket is not None
        p, at = self.layout.params[index], self.layout.shard_offsets(self.rank)[index]
        part = p.part_in(self.bucket.buffer, at, self.rank)
        return torch.view_as_complex(part) if self.layout.is_complex else part

    def gather(self, out: torch.Tensor) -> Handle:
        """Fill `out`, which is the next stage, from all ranks' parts."""
        assert self.bucket is not None
        own = self.bucket.buffer
        if self.is_on_host:
            own = self.bucket.streams.to_device(own, out.device)
        if not torch.is_inference_mode_enabled():
            return self.transport.gather(self.bucket, own, out)
        # Transports keep views from their first gather; made in inference mode they were of no use
        # outside of it.
        with torch.inference_mode(False):
            return self.transport.gather(self.bucket, own, out)


class Home(Stage):
    """The registered stage where replicas share a shard out. A bucket like any other, on a
    transport whose shard axis is the replicate axis.
    """

    def __init__(
        self, name: str, layout: BucketLayout, mesh: ShardMesh, transport: Transport
    ) -> None:
        layout = home_layout(layout, mesh.shard.rank)
        super().__init__(f"{name}/home", layout, transport, mesh.replicate.rank)
        self._shard_rank = mesh.shard.rank
        self._middle: torch.Tensor | None = None
        self._reduces: tuple[ReduceLayout, ReduceLayout] | None = None

    def allocate(self, device: torch.device) -> Bucket:
        bucket = super().allocate(device)
        bucket.follows = True  # whoever reduces the shard reduces this
        if not self.layout.chunk_numel:  # other shards have rows; all ranks see a move alike
            bucket.buffer = bucket.buffer.new_zeros(1)
        self._middle = None
        return bucket

    def fill(self, middle: Stage) -> Handle:
        """Gather the middle from the replicas."""
        if self._middle is None:  # one object for good: transports keep their plans by it
            assert middle.bucket is not None
            self._middle = middle.bucket.buffer[: self.layout.full_numel]
        return self.gather(self._middle) if self._middle.numel() else DONE

    # -- gradients -------------------------------------------------------------------------------
    def reduce(
        self, out: torch.Tensor, first: ReduceLayout, had: tuple[bool, ...]
    ) -> tuple[Handle, torch.Tensor, ReduceLayout]:
        """Second stage: sums over the shard axis, with the counts behind them, become this rank's
        part of the sum over both axes.
        """
        assert self.bucket is not None
        layout = self._reduce_layout(first)
        total = out.new_empty(layout.chunk_numel)
        grads = self.transport.grad_buffer(self.bucket, layout, total)
        for j, part in enumerate(self._parts(out, first)):
            # Where no rank of this replica had a gradient it counts as absent.
            if had[j] or out[first.counts_offset + j].item() != 0:
                grads.put(j, part)
        return self.transport.reduce(self.bucket, grads, total, 1.0), total, layout

    def cut(self, out: torch.Tensor, first: ReduceLayout) -> tuple[torch.Tensor, ReduceLayout]:
        """This rank's part of sums that all replicas have (those of a reproducible step)."""
        layout = self._reduce_layout(first)
        total = out.new_zeros(layout.chunk_numel)
        for p, at, part in zip(
            layout.params, layout.offsets(self.rank), self._parts(out, first), strict=True
        ):
            rows = p.rows_of(part, self.rank)
            total[at : at + rows.numel()].view(rows.shape).copy_(rows)
        total[layout.counts_offset :].copy_(out[first.counts_offset :])
        return total, layout

    def _parts(self, out: torch.Tensor, first: ReduceLayout) -> list[torch.Tensor]:
        """The shard's part of every gradient, as views."""
        rank = self._shard_rank
        pairs = zip(first.params, first.offsets(rank), strict=True)
        return [p.part_in(out, at, rank) for p, at in pairs]

    def _reduce_layout(self, first: ReduceLayout) -> ReduceLayout:
        if self._reduces is None or self._reduces[0] is not first:
            self._reduces = (first, home_reduce(self.layout, first))
        return self._reduces[1]


def bring_up_to_date(units: Iterable[Unit]) -> None:
    """Fill the middles of what was written since; inside a phase, by all ranks alike.

    Where peers read shards without being asked, nobody does before all have written theirs.
    """
    filled: dict[Transport, None] = {}
    for unit in units:
        unit.fill_middles()
        filled |= dict.fromkeys(b.transport for b in unit.buckets if b.home is not None)
    for transport in filled:
        if transport.reads_at_any_time:
            transport.agree([False])


# -- parts over a smaller world --------------------------------------------------------------------
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


class Part(Stage):
    """The stage between forward and backward of `reshard_after_forward=int`: 1/`world` of the full
    parameters, in the gather dtype. `is_kept` while it holds those of a forward.
    """

    def __init__(
        self, state: BucketState, world: int, open_on: Callable[[ShardMesh], Transport]
    ) -> None:
        self.serves = state.transport.is_ordered  # the backward gathers from it
        self._mesh = mesh = grouped_mesh(state.mesh, world)
        if self.serves:
            transport = open_on(mesh)
        else:  # ranks come here by themselves: nothing that others share
            transport = open_transport(ANYWHERE, mesh.shard, mesh.replicate, mesh.device)
        dtype, specs = state.layout.gather_dtype, [p.spec for p in state.layout.params]
        layout = layout_bucket(
            [replace(spec, dtype=dtype, cuts=None) for spec in specs],
            gather_dtype=dtype,
            reduce_dtype=state.layout.reduce_dtype,
            world=mesh.shard.size,
        )
        name = f"{state.name}/{mesh.shard.size}"
        super().__init__(name, layout, transport, mesh.shard.rank)
        self.allocate(mesh.device)
        self.is_kept = False
        for i, param in enumerate(state.params):
            param.between = self._form_of(i, param)

    def _form_of(self, index: int, param: ShardedParam) -> nn.Parameter | None:
        """What modules hold meanwhile. DTensors over other axes have no such form: their modules
        hold the usual shards, though the backward gathers from the group.
        """
        if param.spread.whole is not None:
            return None
        spread = plain_spread(param.spread.shape, param.layout.spec.shard_dim, self._mesh)
        flag = param.sharded.requires_grad
        form = make_parameter(self.rows(index), spread, param.name, None, flag)
        assert param.belongings is not None
        param.belongings.give(form)
        return form

    @torch.no_grad()
    def keep(self, params: list[ShardedParam]) -> None:
        """Copy this rank's parts out of the full parameters."""
        for i, param in enumerate(params):
            rows = self.layout.params[i].rows_of(param.full_own, self.rank)
            self.rows(i).copy_(rows)
        self.is_kept = True
