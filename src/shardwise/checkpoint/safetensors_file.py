"""The safetensors format: 8 bytes of header length, a JSON header, the tensors one after the other.

Written and read here rather than through the library, because a checkpoint wants what it does not
offer: headers that are laid out before the data exists, blocks with checksums, and reads without a
memory map. The reader refuses what does not fit exactly. Format:
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.bounded import counts, max_metadata_bytes, parse_json, shape_of, short
from shardwise.checkpoint.dtypes import dtype_name, dtype_of
from shardwise.checkpoint.files import CheckedFile
from shardwise.errors import CheckpointError


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


def read_header(file: CheckedFile) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a file and its metadata; CheckpointError where anything does not fit."""
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
    header = parse_json(text, f"{where}: its header", file.size_bytes, _no_duplicates)
    if not isinstance(header, dict):
        raise CheckpointError(f"{where}: its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    found = {name: _stored(name, value, 8 + length, where) for name, value in header.items()}
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
    return found, metadata if isinstance(metadata, dict) else {}


def _stored(name: str, value: Any, data_start: int, where: str) -> Stored:
    where = f"{where}: {name}"
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected an object in the header, found {short(value)}")
    shape = shape_of(value.get("shape"), f"{where}: shape")
    begin, end = counts(value.get("data_offsets"), f"{where}: data_offsets", length=2)
    stored = Stored(name, dtype_of(value.get("dtype"), where), shape, data_start + begin)
    if stored.size_bytes != end - begin:
        raise CheckpointError(f"{where}: {end - begin} bytes for shape {shape} of {stored.dtype}")
    return stored


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found
