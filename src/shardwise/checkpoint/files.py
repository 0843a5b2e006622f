"""Files whose every block has a checksum: written once from front to back, verified as they are
read.

A file is cut into blocks of `BLOCK_BYTES`; the manifest holds one checksum for each (the first 64
bits of SHA-256, which processors compute faster than CRC-32). So a rank that needs a few rows reads
and verifies the blocks around them and nothing else, and no byte is used before its block was
verified. Reads go through `pread`, not through a memory map: mapped pages count as memory of the
process, and a file that is truncated under a map ends it with SIGBUS. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.bounded import open_regular
from shardwise.checkpoint.said import Said
from shardwise.errors import CheckpointError

BLOCK_BYTES = 2**20
_HEX_DIGITS = 16


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest knows of a file: its size, and the checksums of its blocks in a row."""

    size_bytes: int
    checksums: str

    def to_json(self) -> dict[str, Any]:
        return {"size_bytes": self.size_bytes, "checksums": self.checksums}

    @classmethod
    def from_json(cls, said: Said) -> FileEntry:
        entry = cls(said.at("size_bytes").count(), said.at("checksums").text())
        if len(entry.checksums) != entry.num_blocks * _HEX_DIGITS:
            found = len(entry.checksums) / _HEX_DIGITS
            raise CheckpointError(f"{said}: {entry.num_blocks} blocks, found {found:g} checksums")
        return entry

    def of_block(self, block: int) -> str:
        return self.checksums[block * _HEX_DIGITS : (block + 1) * _HEX_DIGITS]

    @property
    def num_blocks(self) -> int:
        return -(-self.size_bytes // BLOCK_BYTES)


class CheckedWriter:
    """Writes a file of a size that is known before; its space is reserved at once, so that a full
    disk shows here."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path, self.size_bytes, self._written = path, size_bytes, 0
        self._sums: list[str] = []
        self._hash, self._in_block = hashlib.sha256(), 0
        self._file = path.open("wb", buffering=0)
        try:
            if size_bytes:
                os.posix_fallocate(self._file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                self._file.close()
                raise

    def write(self, content: bytes | bytearray | memoryview) -> None:
        view = memoryview(content).cast("B") if not isinstance(content, bytes) else content
        start = 0
        while start < len(view):
            take = min(BLOCK_BYTES - self._in_block, len(view) - start)
            part = view[start : start + take]
            write_all(self._file.fileno(), part)
            self._hash.update(part)
            self._in_block += take
            start += take
            if self._in_block == BLOCK_BYTES:
                self._end_block()
        self._written += len(view)

    def _end_block(self) -> None:
        self._sums.append(self._hash.hexdigest()[:_HEX_DIGITS])
        self._hash, self._in_block = hashlib.sha256(), 0

    def finish(self) -> FileEntry:
        """Syncs and closes; the manifest's entry."""
        if self._in_block:
            self._end_block()
        assert self._written == self.size_bytes, f"{self.path}: {self._written} bytes written"
        os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(self.size_bytes, "".join(self._sums))

    def abandon(self) -> None:
        self._file.close()


def write_all(descriptor: int, content: Any) -> None:
    """`os.write` until everything is out: one call may write a part."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


class CheckedFile:
    """Reads parts of a file, each block verified before it is used.

    Without an entry (foreign files have no checksums) only sizes are checked. One block is kept:
    the small tensors of a file lie side by side.
    """

    def __init__(self, path: Path, entry: FileEntry | None = None) -> None:
        self.path, self._entry, self._held = path, entry, -1
        self._descriptor = open_regular(path)
        self.size_bytes = os.fstat(self._descriptor).st_size
        if entry is not None and self.size_bytes != entry.size_bytes:
            self.close()
            raise CheckpointError(
                f"{path}: damaged: {self.size_bytes} bytes instead of {entry.size_bytes}"
            )
        self._block = bytearray(min(BLOCK_BYTES, self.size_bytes)) if entry is not None else b""

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fills `out` (bytes) with what stands at `offset`."""
        self._check_span(offset, len(out))
        if self._entry is None:
            self._pread(offset, out)
            return
        done = 0
        while done < len(out):
            block, start = divmod(offset + done, BLOCK_BYTES)
            self._hold(block)
            take = min(BLOCK_BYTES - start, len(out) - done)
            out[done : done + take] = memoryview(self._block)[start : start + take]
            done += take

    def read(self, offset: int, size_bytes: int) -> bytearray:
        self._check_span(offset, size_bytes)
        buffer = bytearray(size_bytes)
        self.read_into(offset, memoryview(buffer))
        return buffer

    def _check_span(self, offset: int, size_bytes: int) -> None:
        if offset < 0 or offset + size_bytes > self.size_bytes:
            raise CheckpointError(
                f"{self.path}: damaged: bytes {offset} to {offset + size_bytes} are wanted, the "
                f"file has {self.size_bytes}"
            )

    def verify(self, part: int = 0, num_parts: int = 1) -> None:
        """Reads every `num_parts`-th block, from `part`; CheckpointError at the first bad one."""
        assert self._entry is not None
        for block in range(part, self._entry.num_blocks, num_parts):
            self._hold(block)

    def _hold(self, block: int) -> None:
        if block == self._held:
            return
        assert self._entry is not None
        self._held = -1
        start = block * BLOCK_BYTES
        view = memoryview(self._block)[: min(BLOCK_BYTES, self.size_bytes - start)]
        self._pread(start, view)
        found, wanted = hashlib.sha256(view).hexdigest()[:_HEX_DIGITS], self._entry.of_block(block)
        if found != wanted:
            raise CheckpointError(
                f"{self.path}: damaged: bytes {start} to {start + len(view)} have checksum "
                f"{found}, the manifest says {wanted}"
            )
        self._held = block

    def _pread(self, offset: int, out: memoryview) -> None:
        while out:
            try:
                count = os.preadv(self._descriptor, [out[: 2**30]], offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from None
            if not count:
                raise CheckpointError(f"{self.path}: damaged: ends at byte {offset}")
            offset, out = offset + count, out[count:]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_checked(path: Path, content: bytes) -> FileEntry:
    """A small file at once."""
    return write_pieces(path, len(content), [content])


def write_pieces(path: Path, size_bytes: int, pieces: Iterable[bytes | memoryview]) -> FileEntry:
    writer = CheckedWriter(path, size_bytes)
    try:
        for piece in pieces:
            writer.write(piece)
        return writer.finish()
    finally:
        writer.abandon()


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def free_bytes(folder: Path) -> int:
    """What may still be written where `folder`, which exists, lies."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def text_of(path: Path) -> str:
    """The content of a small file; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file so that readers, and a crash, see the old or the new content, never a
    mixture."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_synced(temporary, content)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
