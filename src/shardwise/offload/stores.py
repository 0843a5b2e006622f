"""Where chunks lie: in memory, or in a file from which they are streamed.

    stream   each chunk's bytes in turn, to be changed in place until the next one is asked for
    section  the bytes of one slot of a chunk, to be read

`FileStore` has a thread that reads ahead and one that writes behind, and a ring of buffers between
them:

    reader   chunk 3, 4      at most `read_ahead` that are not asked for yet
    caller   chunk 2         at most one
    writer   chunk 1, 0      at most `write_behind` that are not in the file yet

The three numbers are all the memory it takes. A chunk is not read before it was written. In front
of each chunk stands a header: which file of which process, which chunk, how often it was written,
and a checksum of each slot. What a header has to be is kept in memory, so a write that was lost or
torn, bytes that changed and a chunk at a wrong place are all found when it is read.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from shardwise.errors import OffloadError
from shardwise.offload.chunks import PAGE, Chunk, Slot
from shardwise.offload.files import MAGIC, WorkingFile, aligned

Visit = tuple[Chunk, bool]  # a chunk, and whether its contents are there and are wanted

_FIELDS = struct.Struct("<8s16sQQ")


class Store(Protocol):
    """What the optimizer asks for."""

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Room for chunks, for good."""

    def stream(self, visits: Iterable[Visit]) -> Iterator[Tensor]:
        """The bytes of each chunk. What the caller leaves in them is kept when it asks for the
        next one, or has reached the end; if it stops before, it is not."""

    def prefetch(self, chunks: Iterable[Chunk]) -> None:
        """A hint that these are streamed next."""

    def section(self, chunk: Chunk, slot: Slot) -> Tensor:
        """The bytes of one slot, valid until the next call; not to be changed."""

    def flush(self) -> None:
        """Waits for what is under way, and raises what went wrong in it."""

    def reset(self) -> None:
        """What went wrong is forgotten; all chunks are to be written anew."""

    def close(self) -> None:
        """Gives everything back."""


class MemoryStore:
    """All chunks in memory that `allocate` gives."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._memory: dict[int, Tensor] = {}

    def add(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._memory[chunk.index] = self._allocate(chunk.size_bytes)

    def stream(self, visits: Iterable[Visit]) -> Iterator[Tensor]:
        for chunk, _ in visits:
            yield self._memory[chunk.index]

    def prefetch(self, chunks: Iterable[Chunk]) -> None:
        return None

    def section(self, chunk: Chunk, slot: Slot) -> Tensor:
        return chunk.section_of(self._memory[chunk.index], slot)

    def flush(self) -> None:
        return None

    def reset(self) -> None:
        return None

    def close(self) -> None:
        self._memory.clear()


class FileStore:
    """Chunks in a file, a few of them in memory."""

    def __init__(
        self,
        file: WorkingFile,
        read_ahead: int,
        write_behind: int,
        allocate: Callable[[int], Tensor] = aligned,
    ) -> None:
        self._file, self._read_ahead, self._allocate = file, read_ahead, allocate
        self._num_buffers = read_ahead + 1 + write_behind
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._behind = threading.BoundedSemaphore(write_behind)
        self._buffer_bytes = 0
        self._spare: Tensor | None = None  # for `section`
        self._nonce = os.urandom(16)
        self._starts: dict[int, int] = {}
        self._headers: dict[int, bytes] = {}  # what stands before each chunk that was written
        self._writes: dict[int, Future[None]] = {}
        self._fetched: dict[int, Future[Tensor]] = {}  # by `prefetch`, not streamed yet
        self._error: OffloadError | None = None
        self._reader = ThreadPoolExecutor(1, "offload reader")
        self._writer = ThreadPoolExecutor(1, "offload writer")

    # -- room ------------------------------------------------------------------------------------
    def add(self, chunks: Sequence[Chunk]) -> None:
        self.flush()
        self._drop_fetched()
        end = self._file.size_bytes
        for chunk in chunks:
            self._starts[chunk.index] = end
            end += chunk.size_bytes
        if end > self._file.size_bytes:
            self._file.reserve(end)
        largest = max([PAGE, *(c.size_bytes for c in chunks)])
        if largest > self._buffer_bytes:
            self._buffer_bytes, self._spare = largest, None
            while not self._free.empty():
                self._free.get()
            for _ in range(self._num_buffers):
                self._free.put(self._allocate(largest))

    @property
    def memory_bytes(self) -> int:
        """What the ring takes."""
        return self._num_buffers * self._buffer_bytes

    # -- streaming -------------------------------------------------------------------------------
    def stream(self, visits: Iterable[Visit]) -> Iterator[Tensor]:
        coming: deque[tuple[Chunk, Future[Tensor]]] = deque()
        left = iter(visits)
        try:
            while True:
                self._raise_error()
                while len(coming) <= self._read_ahead and (visit := next(left, None)):
                    coming.append((visit[0], self._coming(*visit)))
                if not coming:
                    return
                chunk, future = coming.popleft()
                buffer, is_kept = future.result(), False
                try:
                    yield buffer[: chunk.size_bytes]
                    is_kept = True
                finally:
                    if not is_kept:
                        self._free.put(buffer)
                self._behind.acquire()
                self._writes[chunk.index] = self._writer.submit(self._save, chunk, buffer)
        finally:
            for _, future in coming:
                if future.exception() is None:
                    self._free.put(future.result())

    def prefetch(self, chunks: Iterable[Chunk]) -> None:
        """Each buffer that it takes is one less for reading ahead until its chunk is streamed."""
        for chunk in chunks:
            if len(self._fetched) >= self._read_ahead:
                return
            if chunk.index not in self._fetched:
                self._fetched[chunk.index] = self._reader.submit(self._load, chunk, True)

    def _coming(self, chunk: Chunk, is_wanted: bool) -> Future[Tensor]:
        fetched = self._fetched.pop(chunk.index, None)
        return fetched or self._reader.submit(self._load, chunk, is_wanted)

    def _drop_fetched(self) -> None:
        for future in self._fetched.values():
            if future.exception() is None:
                self._free.put(future.result())
        self._fetched.clear()

    def _load(self, chunk: Chunk, is_wanted: bool) -> Tensor:
        buffer = self._free.get()
        try:
            if is_wanted and chunk.slots:
                self._await_write(chunk)
                memory = buffer[: chunk.size_bytes]
                self._file.read(self._starts[chunk.index], bytes_of(memory))
                self._check_header(chunk, bytes(bytes_of(memory[:PAGE])))
                for slot in chunk.slots:
                    self._check_section(chunk, slot, chunk.section_of(memory, slot))
            return buffer
        except BaseException:
            self._free.put(buffer)
            raise

    def _save(self, chunk: Chunk, buffer: Tensor) -> None:
        try:
            if chunk.slots and self._error is None:
                memory = buffer[: chunk.size_bytes]
                header = self._new_header(chunk, memory)
                memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
                memory[len(header) : PAGE] = 0
                self._headers[chunk.index] = header
                self._file.write(self._starts[chunk.index], bytes_of(memory))
        except OffloadError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - raised where the caller is
            self._error = OffloadError(f"{self._file.path}: {error}")
        finally:
            self._free.put(buffer)
            self._behind.release()

    def _await_write(self, chunk: Chunk) -> None:
        if (write := self._writes.get(chunk.index)) is not None:
            write.result()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise OffloadError(str(self._error))

    def flush(self) -> None:
        for write in list(self._writes.values()):
            write.result()
        self._writes.clear()
        self._raise_error()

    def reset(self) -> None:
        for write in self._writes.values():
            write.result()
        self._writes.clear()
        self._drop_fetched()
        self._error = None

    # -- reading a slot --------------------------------------------------------------------------
    def section(self, chunk: Chunk, slot: Slot) -> Tensor:
        self._await_write(chunk)
        if self._spare is None:
            self._spare = aligned(self._buffer_bytes)
        out = self._spare[: chunk.section_bytes(slot)]
        self._file.read(self._starts[chunk.index] + chunk.section_start(slot), bytes_of(out))
        self._check_section(chunk, slot, out)
        return out

    # -- headers ---------------------------------------------------------------------------------
    def _new_header(self, chunk: Chunk, memory: Tensor) -> bytes:
        before = self._headers.get(chunk.index)
        count = 1 + (_FIELDS.unpack_from(before)[3] if before else 0)
        sums = [_checksum(chunk.section_of(memory, slot)) for slot in chunk.slots]
        fields = _FIELDS.pack(MAGIC, self._nonce, chunk.index, count)
        return fields + struct.pack(f"<{len(sums)}I", *sums)

    def _check_header(self, chunk: Chunk, found: bytes) -> None:
        wanted = self._headers[chunk.index]
        if found[: len(wanted)] == wanted:
            return
        magic, nonce, index, count = _FIELDS.unpack_from(found)
        expected = _FIELDS.unpack_from(wanted)[3]
        if (magic, nonce) != (MAGIC, self._nonce):
            what = "has no header of this run"
        elif index != chunk.index:
            what = f"is chunk {index}"
        elif count != expected:
            what = f"was written {count} times, {expected} are expected: a write was lost"
        else:
            what = "has other checksums than were written"
        raise self._damaged(chunk, what)

    def _check_section(self, chunk: Chunk, slot: Slot, section: Tensor) -> None:
        at = _FIELDS.size + 4 * chunk.slots.index(slot)
        (wanted,) = struct.unpack_from("<I", self._headers[chunk.index], at)
        if (found := _checksum(section)) != wanted:
            raise self._damaged(
                chunk, f"has checksum {found:08x} of {slot.name!r}, {wanted:08x} was written"
            )

    def _damaged(self, chunk: Chunk, what: str) -> OffloadError:
        return OffloadError(
            f"{self._file.path}: chunk {chunk.index} at byte {self._starts[chunk.index]:,} {what}; "
            "the disk gives back other bytes: start again from the last checkpoint, on another "
            "disk if it happens again"
        )

    def close(self) -> None:
        self._drop_fetched()
        self._reader.shutdown()
        self._writer.shutdown()
        self._file.close()


def _checksum(section: Tensor) -> int:
    return zlib.crc32(bytes_of(section))


def bytes_of(memory: Tensor) -> memoryview:
    """The bytes of a flat tensor in host memory, without a copy."""
    return memory.numpy().data
