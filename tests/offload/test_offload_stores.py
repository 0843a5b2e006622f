"""A `FileStore` by itself: how many chunks are in memory, and when they are read and written."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.offload.chunks import Chunk, Entry, Slot, cut
from shardwise.offload.files import Calls, WorkingFile, aligned
from shardwise.offload.stores import FileStore

SLOT = Slot("kept", torch.float32)


class Counting(Calls):
    """Counts, and holds writes up until the gate is open."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def pread(self, descriptor: int, memory: memoryview, offset: int) -> int:
        self.reads.append(offset)
        return super().pread(descriptor, memory, offset)

    def pwrite(self, descriptor: int, memory: memoryview, offset: int) -> int:
        assert self.gate.wait(20)
        self.writes.append(offset)
        return super().pwrite(descriptor, memory, offset)


def made(
    folder: Path, count: int, ahead: int = 2, behind: int = 2
) -> tuple[FileStore, list[Chunk], Counting, list[int]]:
    calls, allocated = Counting(), list[int]()

    def allocate(size_bytes: int) -> torch.Tensor:
        allocated.append(size_bytes)
        return aligned(size_bytes)

    store = FileStore(WorkingFile(folder / "x.state", calls), ahead, behind, allocate)
    parameter = nn.Parameter(torch.empty(0))
    entry = Entry(parameter, "p", 16_384 * count, (SLOT,), None)
    chunks = cut([entry], 2**16, 0)
    assert len(chunks) == count
    store.add(chunks)
    return store, chunks, calls, allocated


def fill(store: FileStore, chunks: list[Chunk], add: float, is_wanted: bool) -> None:
    for chunk, memory in zip(chunks, store.stream([(c, is_wanted) for c in chunks]), strict=True):
        values = chunk.section_of(memory, SLOT).view(torch.float32)
        if not is_wanted:
            values.fill_(chunk.index)
        values.add_(add)


def values_of(store: FileStore, chunks: list[Chunk]) -> list[float]:
    return [store.section(c, SLOT).view(torch.float32).unique().item() for c in chunks]


def test_memory_is_counted_in_chunks(tmp_path: Path) -> None:
    for ahead, behind in ((0, 1), (2, 2), (1, 3)):
        store, chunks, calls, allocated = made(tmp_path, 9, ahead, behind)
        fill(store, chunks, 0.5, is_wanted=False)
        fill(store, chunks, 0.25, is_wanted=True)
        store.flush()
        assert len(allocated) == ahead + 1 + behind
        assert store.memory_bytes == sum(allocated)
        assert values_of(store, chunks) == [i + 0.75 for i in range(9)]
        assert len(calls.writes) == 18
        store.close()


def test_writes_go_on_behind_and_no_further_than_allowed(tmp_path: Path) -> None:
    store, chunks, calls, _ = made(tmp_path, 6, 1, 2)
    calls.gate.clear()
    stepped: list[int] = []

    def step() -> None:
        visits = [(c, False) for c in chunks]
        for chunk, memory in zip(chunks, store.stream(visits), strict=True):
            chunk.section_of(memory, SLOT).view(torch.float32).fill_(chunk.index)
            stepped.append(chunk.index)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join(0.5)
    assert stepped == [0, 1, 2] and thread.is_alive()  # two wait to be written, one for its turn
    calls.gate.set()
    thread.join(20)
    assert not thread.is_alive()
    assert values_of(store, chunks) == [0, 1, 2, 3, 4, 5]  # a read waits for its write
    store.close()


def test_what_is_fetched_before_is_read_once(tmp_path: Path) -> None:
    store, chunks, calls, _ = made(tmp_path, 6)
    fill(store, chunks, 0.0, is_wanted=False)
    store.prefetch(chunks[3:])  # two of them
    store.prefetch(chunks)
    fill(store, chunks, 1.0, is_wanted=True)
    store.flush()
    assert len(calls.reads) == 6
    assert values_of(store, chunks) == [1, 2, 3, 4, 5, 6]
    store.prefetch(chunks)
    store.add([])
    fill(store, chunks, 1.0, is_wanted=True)
    assert values_of(store, chunks) == [2, 3, 4, 5, 6, 7]
    store.close()
    assert not list(tmp_path.iterdir())


def test_a_forked_process_does_not_remove_the_file(tmp_path: Path) -> None:
    """Workers of a data loader have what their parent has."""
    file = WorkingFile(tmp_path / "x.state")
    child = os.fork()
    if not child:
        file.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "x.state").exists()
    file.close()
    assert not (tmp_path / "x.state").exists()


def test_a_step_that_is_left_keeps_its_chunk_out(tmp_path: Path) -> None:
    store, chunks, _, _ = made(tmp_path, 6)
    fill(store, chunks, 0.0, is_wanted=False)
    for _ in range(5):  # no buffer is lost
        with pytest.raises(ZeroDivisionError):
            for memory in store.stream([(c, True) for c in chunks]):
                chunks[0].section_of(memory, SLOT).view(torch.float32).fill_(7)
                raise ZeroDivisionError
    fill(store, chunks, 1.0, is_wanted=True)
    assert values_of(store, chunks) == [1, 2, 3, 4, 5, 6]
    store.close()
