"""Units hand each other their memory: over 200 steps no buffer is made after the second."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from engine_kit import TRANSPORTS, line

import shardwise as sw
from ranks import on_ranks
from shardwise import _torch_compat
from shardwise.comm.blocks import MAX_IDLE, SMALLEST_BYTES, Blocks

WIDTH, LAYERS = 528, 6  # a weight is just above what blocks are for


class Counted(Blocks):
    """Counts buffers that no idle block was there for."""

    num_made = 0

    def _take(self, size_bytes: int) -> torch.UntypedStorage | None:
        block = super()._take(size_bytes)
        self.num_made += block is None
        return block


@pytest.mark.skipif(_torch_compat._swap_memory is None, reason="this torch cannot swap memory")
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_200_steps_make_no_buffer_after_the_second(rank: int, world: int, transport: str) -> None:
    assert WIDTH * WIDTH * 4 > SMALLEST_BYTES
    blocks, before = Counted(), Blocks.__dict__["of_process"]
    Blocks.of_process = classmethod(lambda cls: blocks)  # type: ignore[method-assign, assignment]
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        sw.shard_model(model, mesh=line(world), unit="Linear", transport=transport)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made, idle = [], []
        for _ in range(200):
            model(torch.randn(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            made.append(blocks.num_made)
            idle.append(blocks.idle_bytes)
    finally:
        Blocks.of_process = before  # type: ignore[method-assign]
    assert 0 < made[-1] == made[1] <= MAX_IDLE
    assert idle[-1] == idle[1] <= MAX_IDLE * 1.125 * WIDTH * WIDTH * 4
