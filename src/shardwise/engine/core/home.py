"""Where registered shards lie when replicas share them out (`hybrid_full_optimizer`).

    home      this rank's part of its shard: registered, like gradient and optimizer state
    middle    the shard, in the gather dtype: the bucket that the shard axis gathers from and
              reduces to, as under `hybrid_shard`
    full      for one use

    forward behind a write     home -> middle, over the replicate axis; all ranks agree on it
    each use                   middle -> full, over the shard axis
    reduction                  full gradients -> shard axis -> shard -> replicate axis -> home

A home is a bucket like any other, on a transport whose shard axis is the replicate axis, so both
stages are the transports' usual gather and reduce. Middles are brought up to date at the beginning
of a forward and nowhere else: a backward uses the values of its forward, and peers that read
shards at any time (shared memory) do so behind one fence. Idea: HFSDP of Megatron-FSDP.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shardwise.comm.transport import DONE, Bucket, Handle, Transport
from shardwise.engine.mesh.axes import ShardMesh
from shardwise.layout import BucketLayout, ReduceLayout, home_layout, home_reduce

if TYPE_CHECKING:
    from shardwise.engine.core.unit import Unit


class Home:
    """The home of one bucket on this rank. `gathered_at` is the mark's count when the middle was
    filled; -1: never.
    """

    def __init__(
        self, name: str, layout: BucketLayout, mesh: ShardMesh, transport: Transport
    ) -> None:
        self.name = name
        self.mesh = mesh
        self.transport = transport
        self.layout = home_layout(layout, mesh.shard.rank)
        self.bucket: Bucket | None = None
        self.gathered_at = -1
        self._middle: torch.Tensor | None = None
        self._reduces: tuple[ReduceLayout, ReduceLayout] | None = None

    @property
    def rank(self) -> int:
        """Which of the replicas this is."""
        return self.mesh.replicate.rank

    def allocate(self, device: torch.device, middle: torch.Tensor) -> Bucket:
        """The home buffer; `middle` is the shard buffer that it fills."""
        self.bucket = self.transport.attach(f"{self.name}/home", self.layout, device)
        self.bucket.follows = True  # whoever reduces the shard reduces this
        if not self.layout.chunk_numel:  # other shards have rows; all ranks see a move alike
            self.bucket.buffer = self.bucket.buffer.new_zeros(1)
        # One object for good: transports keep their plans by it.
        self._middle = middle[: self.layout.full_numel]
        return self.bucket

    def gather(self) -> Handle:
        """Fill the middle from the replicas' homes."""
        assert self.bucket is not None and self._middle is not None
        if not self._middle.numel():
            return DONE
        home = self.bucket.buffer
        if home.device != self._middle.device:
            home = home.to(self._middle.device, non_blocking=True)
        with torch.inference_mode(False):
            return self.transport.gather(self.bucket, home, self._middle)

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
        rank = self.mesh.shard.rank
        return [
            p.part_in(out, at, rank)
            for p, at in zip(first.params, first.offsets(rank), strict=True)
        ]

    def _reduce_layout(self, first: ReduceLayout) -> ReduceLayout:
        if self._reduces is None or self._reduces[0] is not first:
            self._reduces = (first, home_reduce(self.layout, first))
        return self._reduces[1]


def bring_up_to_date(units: Iterable[Unit]) -> None:
    """Gather over the replicate axis what was written since; inside a phase, by all ranks alike.

    Where peers read shards without being asked, nobody does before all have written theirs.
    """
    filled: dict[Transport, None] = {}
    for unit in units:
        unit.fill_middles()
        filled |= dict.fromkeys(b.transport for b in unit.buckets if b.home is not None)
    for transport, one_sided in [(t, t.reads_at_any_time) for t in filled]:
        if one_sided:
            transport.agree([False])
