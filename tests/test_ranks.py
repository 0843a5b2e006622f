"""The pool of ranks itself: what passes, what is reported when it does not, and that nothing stays."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks


@on_ranks(1, 2, 3)
def test_ranks_reduce_over_the_default_group(rank, world):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == sum(range(world))
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_parameters_and_fixtures_reach_the_body(rank, dtype, tmp_path):
    assert torch.ones(1, dtype=dtype).dtype is dtype
    (tmp_path / str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2


@on_ranks(2)
@pytest.mark.parametrize("value", [3])
def test_marks_below_the_decorator_count_too(value, world):
    assert (value, world) == (3, 2)
