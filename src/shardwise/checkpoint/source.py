"""Where tensors can be read from: our checkpoints, and whatever `importing` understands.

A source knows its tensors as wholes and reads any box of one into memory that the caller has.
Memory in between is bounded by `PIECE_BYTES` (or one row, where a row is larger).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.files import CheckedFile
from shardwise.checkpoint.index import INDEX, Chunk, Index, TensorInfo
from shardwise.checkpoint.placement import storage_bytes
from shardwise.checkpoint.store import Checkpoint

PIECE_BYTES = 4 * 2**20


class Source(Protocol):
    """Tensors by key (`model.`, `optim.`, `rng.`), other names of them, values that are none."""

    @property
    def path(self) -> Path:
        """Where it lies, for messages."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Each stored tensor once."""

    @property
    def ties(self) -> Mapping[str, str]:
        """Other names of stored tensors."""

    @property
    def objects(self) -> Mapping[str, Any]:
        """Values that are no tensors."""

    def read(self, key: str, box: Box, out: Tensor) -> None:
        """Copies a box of a tensor into `out`, a tensor of the box's size, any dtype or device."""

    def close(self) -> None:
        """Closes files."""


class CheckpointSource:
    """A checkpoint of our format."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path, self.checkpoint = checkpoint.path, checkpoint
        self._files: dict[str, CheckedFile] = {}
        with checkpoint.open(INDEX) as file:
            content = file.read(0, file.size_bytes)
        sizes = {name: entry.size_bytes for name, entry in checkpoint.files.items()}
        self._index = Index.from_bytes(content, str(checkpoint.path / INDEX), sizes)
        self.tensors = self._index.tensors
        self.ties, self.objects = self._index.ties, self._index.objects

    @property
    def chunks(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Which parts of each tensor lie where."""
        return self._index.chunks

    def read(self, key: str, box: Box, out: Tensor) -> None:
        for chunk in self._index.chunks[key]:
            wanted = chunk.box.meet(box) if box.numel else None
            if wanted is not None:
                file = self._file(chunk.file)
                copy_box(file, chunk.offset, chunk.box, self.tensors[key].dtype, wanted, box, out)

    def _file(self, name: str) -> CheckedFile:
        if name not in self._files:
            if len(self._files) >= 64:  # thousands of ranks wrote: descriptors are few
                self._files.pop(next(iter(self._files))).close()
            self._files[name] = self.checkpoint.open(name)
        return self._files[name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def copy_box(
    file: CheckedFile,
    offset: int,
    stored: Box,
    dtype: torch.dtype,
    wanted: Box,
    box: Box,
    out: Tensor,
) -> None:
    """Copies `wanted`, a part of the `stored` box at byte `offset`, to its place in `out`, which
    holds `box`."""
    if not stored.size:  # a scalar
        buffer = torch.empty((), dtype=dtype)
        file.read_into(offset, storage_bytes(buffer))
        out.copy_(buffer)
        return
    row_bytes = math.prod(stored.size[1:]) * dtype.itemsize
    per_piece = max(1, PIECE_BYTES // row_bytes)
    first = wanted.start[0] - stored.start[0]
    for row in range(first, first + wanted.size[0], per_piece):
        last = min(row + per_piece, first + wanted.size[0])
        piece = stored.rows(row, last)
        buffer = torch.empty(piece.size, dtype=dtype)
        file.read_into(offset + row * row_bytes, storage_bytes(buffer))
        part = wanted.meet(piece)
        assert part is not None
        out[part.slices_in(box)].copy_(buffer[part.slices_in(piece)])


def read_whole(source: Source, key: str) -> Tensor:
    """One tensor, whole."""
    info = source.tensors[key]
    out = torch.empty(info.shape, dtype=info.dtype)
    source.read(key, Box.whole(info.shape), out)
    return out


def resolved(source: Source, key: str) -> str | None:
    """The key under which a tensor is stored: its own, or that of its tie; None if it is absent."""
    return key if key in source.tensors else source.ties.get(key)
