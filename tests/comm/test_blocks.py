"""Blocks: memory that one large buffer gives back is the next one's, views and all."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from shardwise import _torch_compat
from shardwise.comm import blocks as module
from shardwise.comm.blocks import MAX_IDLE, SMALLEST_BYTES, Blocks, block_bytes

SIZE = 3 * SMALLEST_BYTES - 128  # below a step, as sizes are
can_swap = pytest.mark.skipif(
    _torch_compat._swap_memory is None, reason="this torch cannot exchange memory of storages"
)


def over(storage: torch.UntypedStorage, numel: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (numel,), (1,))


@can_swap
def test_what_one_gives_back_is_the_next_ones_and_views_stay_valid():
    blocks, first, second = Blocks(), torch.UntypedStorage(0), torch.UntypedStorage(0)
    blocks.fill(first, SIZE)
    view = over(first, SIZE)[7:20]
    view.fill_(3)
    address = first.data_ptr()
    blocks.empty(first)
    assert blocks.idle_bytes == block_bytes(SIZE)
    blocks.fill(second, SIZE + 64)  # other padding, same block
    found = second.data_ptr()  # compared as numbers: a storage that is shown lists its bytes
    assert found == address and blocks.idle_bytes == 0
    assert over(second, SIZE)[7:20].eq(3).all()  # moved, not copied
    blocks.fill(first, SIZE)
    view.fill_(5)  # made before its memory went away and other memory came
    found = first.data_ptr()
    assert found != address and over(first, SIZE)[7:20].eq(5).all()
    assert over(second, SIZE)[7:20].eq(3).all()


@can_swap
def test_a_block_serves_what_needs_at_least_half_of_it():
    blocks, storage = Blocks(), torch.UntypedStorage(0)
    for size in (2 * SIZE, 4 * SIZE):
        blocks.fill(storage, size)
        blocks.empty(storage)
    blocks.fill(storage, SIZE + 128)
    num_bytes = storage.nbytes()
    assert num_bytes == block_bytes(2 * SIZE)  # the smallest that is large enough
    other = torch.UntypedStorage(0)
    blocks.fill(other, SIZE + 128)
    num_bytes = other.nbytes()
    assert num_bytes == block_bytes(SIZE) and blocks.idle_bytes == block_bytes(4 * SIZE)


@can_swap
def test_so_many_are_idle_at_most_and_the_oldest_goes():
    blocks = Blocks()
    storages = [torch.UntypedStorage(0) for _ in range(MAX_IDLE + 1)]
    for storage in storages:
        blocks.fill(storage, SIZE)
    addresses = [storage.data_ptr() for storage in storages]
    for storage in storages:
        blocks.empty(storage)
    assert blocks.idle_bytes == MAX_IDLE * block_bytes(SIZE)
    taken = []
    for storage in storages[:MAX_IDLE]:
        blocks.fill(storage, SIZE)
        taken.append(storage.data_ptr())
    assert set(taken) == set(addresses[1:])


def test_small_buffers_and_other_torch_versions_go_through_the_heap(monkeypatch):
    blocks, storage = Blocks(), torch.UntypedStorage(0)
    blocks.fill(storage, SMALLEST_BYTES - 1)
    num_bytes = storage.nbytes()
    assert num_bytes == SMALLEST_BYTES - 1
    blocks.empty(storage)
    monkeypatch.setattr(module, "swap_memory", lambda a, b: False)
    blocks.fill(storage, SIZE)
    num_bytes = storage.nbytes()
    assert num_bytes == block_bytes(SIZE)
    blocks.empty(storage)
    num_bytes = storage.nbytes()
    assert num_bytes == 0 and blocks.idle_bytes == 0


def test_idle_blocks_go_with_the_last_who_could_use_them(monkeypatch):
    monkeypatch.setattr(Blocks, "_shared", None)
    one, other = Blocks.of_process(), Blocks.of_process()
    assert one is other
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is other
    del other
    gc.collect()
    assert gone() is None and Blocks.of_process().idle_bytes == 0


@pytest.mark.parametrize("size", [SMALLEST_BYTES, SMALLEST_BYTES + 1, 28_317_696, 2**31 - 5])
def test_rounding_is_small(size: int):
    assert size <= block_bytes(size) <= size * 17 / 16
    assert block_bytes(block_bytes(size)) == block_bytes(size)
