"""Axes and transports for tests on ranks: 1-D over all ranks, and 2 x n meshes."""

from __future__ import annotations

import functools

import torch.distributed as dist

from shardwise.comm.transport import Axis

ALONE = Axis("replicate", (0,), 0, None)


def shard_axis(rank: int, world: int) -> Axis:
    """All ranks on the shard axis."""
    return Axis("shard", tuple(range(world)), rank, dist.group.WORLD)


def alone(name: str, rank: int) -> Axis:
    """An axis of size 1."""
    return Axis(name, (rank,), 0, None)


@functools.cache
def hybrid_axes(rank: int, shard: int, replicate: int) -> tuple[Axis, Axis]:
    """Axes of a mesh of `replicate` rows with `shard` ranks each; groups live with the process."""
    rows = [tuple(range(r * shard, (r + 1) * shard)) for r in range(replicate)]
    columns = [tuple(range(c, shard * replicate, shard)) for c in range(shard)]
    groups = {ranks: dist.new_group(list(ranks)) for ranks in (*rows, *columns)}
    row, column = rows[rank // shard], columns[rank % shard]
    return (
        Axis("shard", row, rank % shard, groups[row]),
        Axis("replicate", column, rank // shard, groups[column]),
    )
