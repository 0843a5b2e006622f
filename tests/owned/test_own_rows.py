"""Placements that keep blocks and matrices whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.mesh.rows import rows_of
from shardwise.layout import Cuts


@given(
    shape=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    elements=st.integers(32, 256),
    world=st.integers(1, 7),
)
def test_no_block_is_split(shape: list[int], elements: int, world: int) -> None:
    """Of the flattened tensor, on any number of ranks; every row has one rank."""
    param = nn.Parameter(torch.empty(shape, device="meta"))
    place = sw.whole_blocks(elements)(param)
    cuts = Cuts.even(shape[0], world) if place is None else rows_of(place, shape[0], world)
    assert cuts is not None and cuts.rows == shape[0]
    row = math.prod(shape[1:])
    for rank in range(world):
        start = cuts.start(rank) * row
        assert start % elements == 0 or start == math.prod(shape)


@given(st.integers(1, 7), st.integers(1, 40))
def test_a_matrix_is_whole_on_its_owner(world: int, num: int) -> None:
    model = nn.ModuleList([nn.Linear(3 + i % 5, 4 + i % 3, device="meta") for i in range(num)])
    place = sw.whole_matrices(model, world)
    held = [0] * world
    for param in model.parameters():
        found = place(param)
        if param.ndim < 2:
            assert found is None
            continue
        sizes = [found.cuts(param.shape[0], world).size(r) for r in range(world)]
        assert sorted(sizes) == [0] * (world - 1) + [param.shape[0]]
        held[sizes.index(param.shape[0])] += 1
    assert max(held) - min(held) <= num


@on_ranks(2, 3)
def test_a_model_trains_with_them(rank: int, world: int) -> None:
    """As one that is cut evenly: weights of one process, behind two steps."""
    mesh = init_device_mesh("cpu", (world,))

    def trained(place: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))
        options = {} if place is None else {"shard_placement_fn": place(model)}
        for layer in model:
            if isinstance(layer, nn.Linear):
                sw.fully_shard(layer, mesh=mesh, **options)
        sw.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(2):
            torch.manual_seed(step)
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor() for p in model.parameters()]

    usual = trained(None)
    for place in (lambda m: sw.whole_matrices(m, world), lambda m: sw.whole_blocks(64)):
        for ours, theirs in zip(trained(place), usual, strict=True):
            assert torch.equal(ours, theirs)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="at least 1 row"):
        sw.BlockRows(0, 0)
    with pytest.raises(ValueError, match="owner"):
        sw.WholeOn(-1)
    with pytest.raises(ValueError, match="elements"):
        sw.whole_blocks(0)
    assert sw.WholeOn(1) == sw.WholeOn(1) != sw.WholeOn(2)
