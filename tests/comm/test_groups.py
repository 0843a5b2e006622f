"""Process groups beside those of the mesh: who answers a question of hosts."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from axes import shard_axis

from ranks import on_ranks
from shardwise._torch_compat import timeout_of
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
    cpu = torch.device("cpu")
    first = for_reductions((0, 1), None, cpu)
    assert first is for_reductions((0, 1), dist.group.WORLD, cpu)
    assert first is not dist.group.WORLD and first is not None
    assert timeout_of(first, cpu) == timeout_of(None, cpu)


@on_ranks(2)
def test_reductions_have_the_timeout_of_their_mesh(rank: int, world: int) -> None:
    cpu, soon = torch.device("cpu"), timedelta(seconds=31)
    own = dist.new_group([0, 1], timeout=soon, backend="cpu:gloo")
    group = for_reductions((0, 1), own, cpu)
    assert group is not own and group is not for_reductions((0, 1), None, cpu)
    assert timeout_of(group, cpu) == soon
    assert dist.get_backend_config(group) == "cpu:gloo"
