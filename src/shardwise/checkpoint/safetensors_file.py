"""The safetensors format: 8 bytes of header length, a JSON header, the tensors one after the other.

Written and read here rather than through the library, because a checkpoint wants what it does not
offer: headers that are laid out before the data exists, blocks with checksums, and reads without a
memory map. The reader refuses what does not fit exactly. Format:
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.bounded import max_metadata_bytes, parse_json
from shardwise.checkpoint.dtypes import dtype_name, dtype_of
from shardwise.checkpoint.files import CheckedFile
from shardwise.checkpoint.said import Said
from shardwise.errors import CheckpointError

Pieces = Callable[[str], Iterator[memoryview]]


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file: `offset` counts from the file's first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file before it is written: its header's bytes, where each tensor goes, its size."""

    header: bytes
    tensors: tuple[Stored, ...]
    size_bytes: int

    def content(self, pieces: Pieces) -> Iterator[bytes | memoryview]:
        """The file from front to back, with the bytes of each tensor in pieces."""
        yield self.header
        for stored in self.tensors:
            yield from pieces(stored.name)


def lay_out(
    entries: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str]
) -> FileLayout:
    """The file that holds these tensors in this order. The largest items come first, as the
    library has it, so that all are aligned."""
    ordered = sorted(entries, key=lambda e: -e[1].itemsize)
    described: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    spans, offset = [], 0
    for name, dtype, shape in ordered:
        size = math.prod(shape) * dtype.itemsize
        described[name] = {
            "dtype": dtype_name(dtype, name),
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        spans.append((name, dtype, tuple(shape), offset))
        offset += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    tensors = tuple(Stored(n, d, s, at + len(header)) for n, d, s, at in spans)
    return FileLayout(header, tensors, len(header) + offset)


def read_header(file: CheckedFile) -> dict[str, Stored]:
    """The tensors of a file; CheckpointError where anything does not fit."""
    where = str(file.path)
    if file.size_bytes < 8:
        raise CheckpointError(f"{where}: {file.size_bytes} bytes are no safetensors file")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > file.size_bytes - 8:
        raise CheckpointError(
            f"{where}: no safetensors file, or truncated: a header of {length} bytes in a file of "
            f"{file.size_bytes}"
        )
    text = file.read(8, min(length, max_metadata_bytes(file.size_bytes) + 1))
    header = f"{where}: its header"
    said = Said(parse_json(text, header, file.size_bytes), header).entries()
    said.pop("__metadata__", None)
    found = {name: _stored(entry, name, 8 + length) for name, entry in said.items()}
    end = 8 + length
    for stored in sorted(found.values(), key=lambda s: (s.offset, s.size_bytes)):
        if stored.offset != end:
            raise CheckpointError(
                f"{where}: {stored.name} begins at byte {stored.offset}, expected {end}"
            )
        end += stored.size_bytes
    if end != file.size_bytes:
        raise CheckpointError(
            f"{where}: truncated or damaged: {file.size_bytes} bytes, its header says {end}"
        )
    return found


def _stored(said: Said, name: str, data_start: int) -> Stored:
    shape, (begin, end) = said.at("shape").shape(), said.at("data_offsets").counts(2)
    dtype = dtype_of(said.at("dtype").value, str(said))
    stored = Stored(name, dtype, shape, data_start + begin)
    if stored.size_bytes != end - begin:
        raise CheckpointError(f"{said}: {end - begin} bytes for shape {shape} of {dtype}")
    return stored
