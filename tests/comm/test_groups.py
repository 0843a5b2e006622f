"""Process groups beside those of the mesh: who answers a question of hosts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from axes import shard_axis

from ranks import on_ranks
from shardwise.comm import groups
from shardwise.comm.groups import for_reductions, on_host
from shardwise.comm.kept import kept

DEVICE = torch.device("cuda")  # nobody looks at it


@on_ranks(2)
def test_hosts_agree_over_a_group_that_moves_host_memory(
    rank: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    axis = shard_axis(rank, world)
    assert on_host(axis.ranks, axis.group, torch.device("cpu"))[0] is axis.group
    assert on_host(axis.ranks, axis.group, DEVICE)[0] is axis.group, "Gloo serves the CPU already"
    monkeypatch.setattr(groups, "backend_name", lambda group, device: "")  # as NCCL alone
    group, device = on_host(axis.ranks, axis.group, DEVICE)
    assert group is not axis.group and device.type == "cpu"
    assert on_host(axis.ranks, axis.group, DEVICE)[0] is group, "made once"
    vote = torch.tensor([rank])
    dist.all_reduce(vote, dist.ReduceOp.MAX, group)
    assert vote.item() == 1
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    kept("host groups").clear()
    assert on_host(axis.ranks, axis.group, DEVICE) == (axis.group, DEVICE)


@on_ranks(2)
def test_meshes_of_the_same_ranks_reduce_over_one_group(rank: int, world: int) -> None:
    first = for_reductions((0, 1))
    assert first is for_reductions((0, 1)) and first is not dist.group.WORLD
