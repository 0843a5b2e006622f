"""Optimizer state in 8 and 4 bits (torchao): as in one process, and in checkpoints that other
numbers of ranks read, bit for bit.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from ranks import on_ranks, run_ranks
from shardwise.engine.mesh.rows import part_of, rows_of
from shardwise.errors import CheckpointError
from shardwise.layout import Cuts

KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
LEAST = 4096


@given(
    shape=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    elements=st.sampled_from([32, 128, 256]),
    world=st.integers(1, 7),
)
def test_parts_are_large_or_empty(shape: list[int], elements: int, world: int) -> None:
    """What an optimizer keeps in fewer bits of the whole, it keeps so of each part that is there"""
    num, row = math.prod(shape), math.prod(shape[1:])
    place = sw.whole_blocks(elements, least=LEAST)(nn.Parameter(torch.empty(shape, device="meta")))
    cuts = Cuts.even(shape[0], world) if place is None else rows_of(place, shape[0], world)
    assert cuts is not None and cuts.rows == shape[0]
    is_kept = num >= LEAST and num % elements == 0
    for rank in range(world):
        part = cuts.size(rank) * row
        assert not part or (part >= LEAST and part % elements == 0) == is_kept


class Net(nn.Module):
    """Parts of many rows and of few, one of no whole blocks, a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(96, 256))
        self.few = nn.Parameter(torch.randn(5, 32, 64))
        self.odd = nn.Parameter(torch.randn(61, 101))
        self.small = nn.Parameter(torch.randn(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(p.sum() for p in self.parameters())


def made(world: int, kind: str, place: str) -> tuple[Net, Any]:
    """Torchao compiles its step; as plain operators it is the same arithmetic, without the wait."""
    import torchao.optim

    torch.manual_seed(0)
    net = Net()
    blocks = sw.whole_blocks(256, least=LEAST)
    if place == "hybrid":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        sw.fully_shard(net, mesh=mesh, shard_placement_fn=blocks)
    elif place:
        sw.fully_shard(net, shard_placement_fn=blocks if place == "blocks" else None)
    optimizer = getattr(torchao.optim, kind)(net.parameters(), lr=1e-2)
    return net, sw.local_view(optimizer) if place else optimizer


def step(net: Net, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in net.parameters():
        whole = torch.randn(param.shape, generator=generator)
        param.grad = param.detach().clone()
        if isinstance(param, DTensor):
            part = part_of(whole, param.device_mesh, param.placements)
            param.grad.to_local().copy_(part)
        else:
            param.grad.copy_(whole)
    with mock.patch("torch.compile", lambda function, **_: function):
        optimizer.step()
    optimizer.zero_grad()


def wholes(net: Net) -> list[torch.Tensor]:
    params = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return [p.detach().clone() for p in params]


def as_one(kind: str, steps: int) -> list[torch.Tensor]:
    net, optimizer = made(1, kind, "")
    for number in range(steps):
        step(net, optimizer, number)
    return wholes(net)


def trained(rank: int, world: int, kind: str, place: str, directory: Path) -> list[torch.Tensor]:
    net, optimizer = made(world, kind, place)
    for number in range(3):
        step(net, optimizer, number)
    sw.CheckpointManager(directory).save(3, net, optimizer)
    kept = optimizer.state[net.wide]["exp_avg"].to_local()
    assert type(kept).__name__.startswith("OptimState") or not kept.numel()
    step(net, optimizer, 3)
    return wholes(net)


def resumed(rank: int, world: int, kind: str, place: str, directory: Path) -> list[torch.Tensor]:
    net, optimizer = made(world, kind, place)
    manager = sw.CheckpointManager(directory)
    checkpoint, _ = manager.latest()
    assert checkpoint is not None
    manager.load(checkpoint, net, optimizer)
    step(net, optimizer, 3)
    return wholes(net)


@pytest.mark.parametrize("kind", KINDS)
def test_state_survives_a_change_of_ranks_bit_for_bit(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    expected = as_one(kind, 4)
    for writers in (2, 3):
        directory = tmp_path / str(writers)
        found = run_ranks(writers, trained, kind, "blocks", directory)[0]
        assert all(map(torch.equal, found, expected))
        all_readers = ((2, "blocks"), (3, "blocks"), (4, "hybrid"), (1, ""))
        for readers, how in all_readers if writers == 3 else all_readers[1:2]:
            for found in run_ranks(readers, resumed, kind, how, directory):
                assert all(map(torch.equal, found, expected)), (writers, readers)


@on_ranks(3)
def test_what_splits_blocks_is_refused(rank: int, world: int, tmp_path: Path) -> None:
    """96 rows of 256 are cut evenly at whole blocks; of 5 slices of 2048 the last rank has 1."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    net, optimizer = made(world, "AdamW8bit", "even")
    step(net, optimizer, 0)
    with pytest.raises(CheckpointError, match=r"whole_blocks\(256, least=4096\)"):
        sw.CheckpointManager(tmp_path).save(1, net, optimizer)


@on_ranks(2)
def test_owned_optimizers_take_none(rank: int, world: int) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    import torchao.optim

    net = Net()
    sw.fully_shard(net)
    with (
        mock.patch("torch.compile", lambda function, **_: function),
        pytest.raises(ValueError, match="local_view"),
    ):
        sw.OwnedOptimizer(net.parameters(), torchao.optim.AdamW8bit, lr=1e-2)
