"""A rank's working file: aligned direct I/O at offsets, by one process, for as long as it lives.

    DIRECTORY/rank_00000.state

Bytes go past the page cache (O_DIRECT) where the file system allows that; else they are handed to
the disk at once and dropped from the cache, which would count as memory of the job in a container.
What stands in a working file serves the process that wrote it and nobody else: a file is emptied
when it is opened, removed when it is closed, and locked in between. After a crash a run goes on
from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import OffloadError
from shardwise.offload.chunks import PAGE

MAGIC = b"swstate1"
_STALLS = 3  # calls in a row that move no page
# Workers of a data loader have their parent's files; they end soon after a parent that was killed.
LOCK_WAIT_S = 6.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Calls:
    """What is asked of the operating system; tests put faults here."""

    def pread(self, descriptor: int, memory: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [memory], offset)

    def pwrite(self, descriptor: int, memory: memoryview, offset: int) -> int:
        return os.pwritev(descriptor, [memory], offset)

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        os.posix_fallocate(descriptor, 0, size_bytes)

    def go_direct(self, descriptor: int) -> None:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)


class WorkingFile:
    """Reads and writes whole pages at offsets. Errors name the file and say what to do.

    Raises:
        OffloadError: it cannot be made, or is another job's.
    """

    def __init__(self, path: Path, calls: Calls | None = None) -> None:
        self.path, self._calls = path, calls or Calls()
        self.size_bytes = 0
        self._descriptor, self._owner = _open_locked(path), os.getpid()
        self.is_direct = True
        try:
            os.ftruncate(self._descriptor, 0)
            self._calls.go_direct(self._descriptor)
        except OSError:
            self.is_direct = False

    def reserve(self, size_bytes: int) -> None:
        """Room for so many bytes: a full disk shows here and not in the middle of a step."""
        try:
            self._calls.reserve(self._descriptor, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise self._failed(f"{size_bytes:,} bytes cannot be reserved", error) from None
            os.ftruncate(self._descriptor, size_bytes)
        self.size_bytes = size_bytes

    def read(self, offset: int, memory: memoryview) -> None:
        self._move("read", offset, memory)
        self._forget(offset, len(memory))

    def write(self, offset: int, memory: memoryview) -> None:
        self._move("write", offset, memory)
        if not self.is_direct:
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                raise self._failed(f"cannot be written at byte {offset:,}", error) from None
            self._forget(offset, len(memory))

    def _move(self, what: str, offset: int, memory: memoryview) -> None:
        call = self._calls.pread if what == "read" else self._calls.pwrite
        done, stalls = 0, 0
        while done < len(memory):
            try:
                count = call(self._descriptor, memory[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EINVAL and self.is_direct:
                    self._go_buffered()  # a file system that takes the flag and not the calls
                    continue
                past = "read" if what == "read" else "written"
                text = f"cannot be {past} at byte {offset + done:,}"
                raise self._failed(text, error) from None
            if count == 0 and what == "read":
                raise OffloadError(
                    f"{self.path}: ends at byte {offset + done:,}, {self.size_bytes:,} are "
                    "expected: somebody has cut it; start again from the last checkpoint"
                )
            # Direct I/O goes on at whole pages only.
            moved = count if done + count == len(memory) else count // PAGE * PAGE
            stalls = 0 if moved else stalls + 1
            if stalls >= _STALLS:
                raise OffloadError(
                    f"{self.path}: only {count} of {len(memory) - done:,} bytes could be "
                    f"{'read' if what == 'read' else 'written'} at byte {offset + done:,}; look at "
                    "the disk, and start again from the last checkpoint"
                )
            done += moved

    def _go_buffered(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.is_direct = False

    def _forget(self, offset: int, size_bytes: int) -> None:
        if not self.is_direct:
            os.posix_fadvise(self._descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def _failed(self, what: str, error: OSError) -> OffloadError:
        todo = "look at the disk"
        if error.errno in _FULL:
            todo = "free some space there, or name another directory"
        return OffloadError(
            f"{self.path}: {what}: {error.strerror or error}; {todo}, and start again from the "
            "last checkpoint"
        )

    def close(self) -> None:
        """Removes it; a process that was forked from the owner only lets go of it."""
        if self._descriptor >= 0:
            if self._owner == os.getpid():
                with contextlib.suppress(OSError):
                    self.path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1


def _open_locked(path: Path) -> int:
    """A descriptor of the file, which this process has to itself."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise OffloadError(
                f"{path}: cannot be made: {error.strerror}; name a directory on a local disk that "
                "can be written to"
            ) from None
        try:
            _take(path, descriptor)
            there = os.stat(path)
            own = os.fstat(descriptor)
            if (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino):
                return descriptor
        except FileNotFoundError:
            pass  # whoever had it has removed it meanwhile
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _take(path: Path, descriptor: int) -> None:
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < give_up:
                time.sleep(0.1)
                continue
            raise OffloadError(
                f"{path}: another job, or another optimizer of this one, is using it; give each a "
                "directory of its own"
            ) from None
        except OSError as error:
            raise OffloadError(
                f"{path}: cannot be locked: {error.strerror}; name a directory on a local disk"
            ) from None
    found = os.fstat(descriptor)
    begin = os.pread(descriptor, len(MAGIC), 0) if stat.S_ISREG(found.st_mode) else b"?"
    if begin not in (b"", bytes(len(MAGIC)), MAGIC):
        raise OffloadError(
            f"{path}: is no working file of an optimizer's state and would be overwritten; move "
            "it, or name another directory"
        )


def aligned(size_bytes: int) -> Tensor:
    """Bytes in memory that begin at a page, as direct I/O wants them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    made: Any = mmap.mmap(-1, max(size_bytes, PAGE), flags=flags)
    return torch.frombuffer(made, dtype=torch.uint8)[:size_bytes]
