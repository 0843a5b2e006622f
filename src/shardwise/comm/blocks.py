"""Memory of large CPU buffers that come and go: a block that one gives back is the next one's.

    gathered copy of L0   | block A |  released  ->  idle  ->  gathered copy of L1
    staging               | block B |  unpacked  ->  idle  ->  gradients of L1, packed

Through the heap it would not come back. torch asks for aligned memory, for which glibc needs more
than the block that was freed has, and activations that live until the backward take corners of it.
So each buffer of each unit grew the heap (`cost` below, a rank of the 50M decoder on c10d). Here
memory goes from storage to storage (`swap_memory`), untouched; its pages stay warm.

    cost      in use at most 638 MiB, the heap 1,140 MiB after two steps, and it went on growing

Devices with an allocator of their own are left to it, and so are small buffers.
"""

from __future__ import annotations

import threading
import weakref

import torch

from shardwise._torch_compat import swap_memory

SMALLEST_BYTES = 2**20
MAX_IDLE = 4  # what is in use together: of the root and of a unit, gathered and packed (or staging)
_MAX_WASTE = 2  # a block serves buffers of at least half its size


def block_bytes(size_bytes: int) -> int:
    """Rounded up to one of 16 steps in each doubling, so that buffers which differ in padding take
    each other's blocks; pages behind a buffer's end are never touched and cost nothing.
    """
    step = 1 << (size_bytes.bit_length() - 5)
    return -(-size_bytes // step) * step


class Blocks:
    """The idle blocks of a process. Buffers hold it, so it goes with the last of them."""

    _shared: weakref.ref[Blocks] | None = None

    def __init__(self) -> None:
        self._idle: list[torch.UntypedStorage] = []  # the newest last
        self._lock = threading.Lock()  # ranks may be threads

    @classmethod
    def of_process(cls) -> Blocks:
        known = None if cls._shared is None else cls._shared()
        if known is None:
            known = cls()
            cls._shared = weakref.ref(known)
        return known

    @property
    def idle_bytes(self) -> int:
        return sum(block.nbytes() for block in self._idle)

    def fill(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Memory of at least this size for an empty storage; what is in it is undefined."""
        if size_bytes < SMALLEST_BYTES or storage.device.type != "cpu":
            storage.resize_(size_bytes)
            return
        block = self._take(size_bytes)
        if block is None:
            storage.resize_(block_bytes(size_bytes))
        else:
            swap_memory(storage, block)

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of a storage; the oldest idle block goes when there are too many."""
        if storage.nbytes() < SMALLEST_BYTES or storage.device.type != "cpu":
            storage.resize_(0)
            return
        block = torch.UntypedStorage(0)
        if not swap_memory(storage, block):
            storage.resize_(0)
            return
        with self._lock:
            self._idle.append(block)
            if len(self._idle) > MAX_IDLE:
                del self._idle[0]

    def _take(self, size_bytes: int) -> torch.UntypedStorage | None:
        """The smallest that is large enough, of those the one that was used last."""
        with self._lock:
            best = None
            for i, block in enumerate(self._idle):
                size = block.nbytes()
                if size_bytes <= size <= size_bytes * _MAX_WASTE and (
                    best is None or size <= self._idle[best].nbytes()
                ):
                    best = i
            return None if best is None else self._idle.pop(best)
