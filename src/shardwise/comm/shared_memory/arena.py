"""The memory that one rank shows to its peers: an anonymous memfd, mapped once, used in ranges.

    | control block | bucket directory .... | range | range | (hole) | range | ...    sparse
      '- control.py                           '- shard buffers and mailbox slots

One file per rank, so that one descriptor gives access to everything that is allocated later: peers
map it once and see new ranges without a call. The size (1 TiB of up to 16 ranks, 256 GiB of 64) is
address space only, 16 TiB for a domain; pages exist where
somebody wrote. Releasing a range punches a hole (MADV_REMOVE), which takes the pages away from
every mapping at once: peers have nothing to drop. A memfd has no name in /dev/shm and lives as
long as a process has it open, so nothing survives `kill -9`, and the size of /dev/shm is no limit.

A range behind a tensor is released when the tensor's storage dies (not the bucket, whose buffer the
parameters share). That may happen at any moment, in any thread and in the middle of an allocation;
the release therefore only punches and queues, and the next allocation puts the queue into the list.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable

import torch

_ALL_BYTES = 1 << 44  # address space for the arenas of one domain: an eighth of what a process has
_SIZES_BYTES = (1 << 40, 1 << 36)  # of one; the second for processes under a limit
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Mapping:
    """One rank's file as this process sees it."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        weakref.finalize(self, os.close, fd).atexit = False
        self.map = _map(fd, size_bytes)
        self.map.madvise(mmap.MADV_DONTDUMP)
        self.bytes = memoryview(self.map)
        self.words = self.bytes.cast("Q")

    def address(self, offset: int) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map, offset))

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor over a range. Its storage keeps the mapping alive."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=numel, offset=offset)

    def owner_lives(self) -> bool:
        """Whether the owner still holds its lock. No pid is asked: zombies, reuse, namespaces."""
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(self.fd, fcntl.F_GETLK, query))
        return kind != fcntl.F_UNLCK


class Arena(Mapping):
    """This rank's own file."""

    def __init__(self, name: str, head_bytes: int, num_ranks: int) -> None:
        fd, size = _create(name, num_ranks)
        super().__init__(fd, size)
        self._pid = os.getpid()
        self._free = [(_pages(head_bytes), size)]
        self._released: deque[tuple[int, int]] = deque()
        # A POSIX lock ends with the process, killed or not, and children do not inherit it. It
        # would also end when any descriptor of this file is closed; this process closes none.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)

    def allocate(self, size_bytes: int) -> int:
        """Offset of a zeroed range, first fit."""
        while self._released:
            self._put_back(*self._released.popleft())
        size = _pages(size_bytes)
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[i] = (start + size, stop)
                return start
        raise MemoryError(f"{size_bytes} bytes do not fit into the arena of {self.size_bytes}")

    def release(self, offset: int, size_bytes: int) -> None:
        """Give pages and range back."""
        self.map.madvise(mmap.MADV_REMOVE, offset, _pages(size_bytes))
        self._released.append((offset, _pages(size_bytes)))

    def owned_tensor(
        self, offset: int, numel: int, dtype: torch.dtype, before: Callable[[], None]
    ) -> torch.Tensor:
        """A tensor whose range is released, after a call of `before`, when its storage dies."""
        size = numel * dtype.itemsize
        view = self.bytes[offset : offset + size]
        # torch keeps the memoryview itself, so its death is the storage's.
        final = weakref.finalize(
            view, _release, self.map, self._released, self._pid, offset, _pages(size), before
        )
        final.atexit = False
        return torch.frombuffer(view, dtype=dtype)

    def _put_back(self, offset: int, size: int) -> None:
        ranges = sorted([*self._free, (offset, offset + size)])
        merged = ranges[:1]
        for start, stop in ranges[1:]:
            if start == merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self._free = [r for r in merged if r[0] < r[1]]


def _release(
    memory: mmap.mmap,
    released: deque[tuple[int, int]],
    pid: int,
    offset: int,
    size: int,
    before: Callable[[], None],
) -> None:
    # A forked child (a data loader's worker) drops its copies too; the pages are the parent's.
    if os.getpid() != pid:
        return
    before()
    memory.madvise(mmap.MADV_REMOVE, offset, size)
    released.append((offset, size))


def arena_bytes(num_ranks: int) -> tuple[int, ...]:
    """Sizes to try for each of so many arenas, which every rank maps all of; several domains fit
    beside each other.
    """
    share = _ALL_BYTES >> (num_ranks - 1).bit_length()
    return tuple(min(size, share) for size in _SIZES_BYTES)


def _create(name: str, num_ranks: int) -> tuple[int, int]:
    """A sparse file of the largest size that this process may map."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    failure: OSError | None = None
    for size in arena_bytes(num_ranks):
        try:
            os.ftruncate(fd, size)
            _map(fd, size)
        except OSError as error:
            failure = error
        else:
            return fd, size
    os.close(fd)
    raise OSError(f"no address space for {_SIZES_BYTES[-1]} bytes (see ulimit -v): {failure}")


def _map(fd: int, size: int) -> mmap.mmap:
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0x4000)  # a name since Python 3.13
    return mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
