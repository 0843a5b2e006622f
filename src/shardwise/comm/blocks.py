"""Memory of large CPU buffers that come and go: a block that one gives back is the next one's.

    gathered copy of L0   | block A |  released  ->  idle  ->  gathered copy of L1
    staging               | block B |  unpacked  ->  idle  ->  gradients of L1, packed

Through the heap it would not come back: torch asks for aligned memory, for which glibc needs more
than the freed block has, and activations take corners of it. A rank of the 50M decoder on c10d used
638 MiB at most, in a heap of 1,140 after two steps. Here memory goes from storage to storage
(`swap_memory`) and stays warm. Small buffers, and devices with allocators of their own, are let be.
"""

from __future__ import annotations

import threading
import weakref

import torch

from shardwise._torch_compat import swap_memory

SMALLEST_BYTES = 2**20
MAX_IDLE = 4  # what is in use together: of the root and of a unit, gathered and packed (or staging)


def block_bytes(size_bytes: int) -> int:
    """In 16 steps a doubling, so that padding makes no difference; pages in vain stay untouched."""
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
        elif (block := self._take(size_bytes)) is None:
            storage.resize_(block_bytes(size_bytes))
        else:
            swap_memory(storage, block)

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of a storage; the oldest idle block goes when there are too many."""
        block = torch.UntypedStorage(0)
        large = storage.nbytes() >= SMALLEST_BYTES and storage.device.type == "cpu"
        if not (large and swap_memory(storage, block)):
            storage.resize_(0)
            return
        with self._lock:
            self._idle = [*self._idle, block][-MAX_IDLE:]

    def _take(self, size_bytes: int) -> torch.UntypedStorage | None:
        """The smallest that is large enough, and at most twice as large; the newest of those."""
        with self._lock:
            sizes = [(block.nbytes(), -i) for i, block in enumerate(self._idle)]
            fitting = [s for s in sizes if size_bytes <= s[0] <= 2 * size_bytes]
            return self._idle.pop(-min(fitting)[1]) if fitting else None
