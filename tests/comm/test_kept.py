"""What lives as long as the process group, and what of it is left behind: nothing."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from ranks import spawn_ranks
from shardwise.comm.shared_memory.arena import Mapping, arena_bytes


class Scaled(nn.Module):
    """With a parameter without dims, on an axis of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.t = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) * self.t


def cycles(rank: int, world: int, folder: str, transport: str) -> list[tuple[int, int]]:
    """Descriptors and threads after each of 30 cycles."""
    seen = []
    for i in range(30):
        dist.init_process_group("gloo", f"file://{folder}/{i}", rank=rank, world_size=world)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
        model = Scaled()
        sw.fully_shard(model.a, mesh=mesh, strategy="shard_grad_op", transport=transport)
        sw.fully_shard(model, mesh=mesh, transport=transport)
        model(torch.ones(2, 8)).sum().backward()
        dist.barrier()
        del model, mesh
        dist.destroy_process_group()
        gc.collect()
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    return seen


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_process_groups_come_and_go(transport: str, tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(dir=tmp_path) as folder,
        spawn_ranks(2, cycles, folder, transport, backend=None) as group,
    ):
        outcomes = group.join(timeout_s=60)
    for outcome in outcomes:
        assert outcome.kind == "ok", outcome
        fds, threads = zip(*outcome.value[3:], strict=True)
        assert max(fds) - min(fds) <= 2, fds
        assert max(threads) - min(threads) <= 1, threads


def test_many_ranks_with_several_meshes_map_all_arenas() -> None:
    """Each of 64 ranks maps the arenas of all, and has two meshes and one more."""
    assert arena_bytes(2)[0] == 1 << 40
    size = arena_bytes(64)[0]
    assert size >= 1 << 37
    mappings = []
    for i in range(3 * 64):
        fd = os.memfd_create(f"arena-{i}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        mappings.append(Mapping(fd, size))
    assert len(mappings) == 192
