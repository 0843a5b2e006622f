"""Hugging Face's directories of weights, in and out.

    model.safetensors                                        one file, or
    model-00001-of-00003.safetensors ...                     several, and
    model.safetensors.index.json                             {"weight_map": {name: file}}

Written in pieces, so that memory stays bounded whatever the size; a tied tensor is written once,
under its first name, as that library does it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint import store
from shardwise.checkpoint.bounded import parse_json, read_metadata, short
from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.files import CheckedFile, sync_directory, write_pieces, write_synced
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.placement import storage_bytes
from shardwise.checkpoint.safetensors_file import FileLayout, Pieces, Stored, lay_out, read_header
from shardwise.checkpoint.said import Said
from shardwise.checkpoint.source import PIECE_BYTES, Source, copy_box
from shardwise.checkpoint.state import MODEL
from shardwise.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
_METADATA = {"format": "pt"}


class SafetensorsSource:
    """A directory, or one file. All tensors are weights: their keys are `model.<name>`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ties: dict[str, str] = {}
        self.objects: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[CheckedFile, Stored]] = {}
        self._files: list[CheckedFile] = []
        names, weight_map = self._file_names()
        for name in names:
            file = CheckedFile((path if path.is_dir() else path.parent) / name)
            self._files.append(file)
            for stored in read_header(file).values():
                key = MODEL + stored.name
                if weight_map is not None and weight_map.get(stored.name) != name:
                    continue
                if key in self.tensors:
                    raise CheckpointError(f"{path}: {stored.name} stands in two files")
                self.tensors[key] = TensorInfo(stored.dtype, stored.shape)
                self._places[key] = (file, stored)
        if missing := sorted((weight_map or {}).keys() - {k[len(MODEL) :] for k in self.tensors}):
            raise CheckpointError(f"{path / INDEX_NAME}: names {missing[0]}, which no file holds")

    def _file_names(self) -> tuple[list[str], dict[str, str] | None]:
        if not self.path.is_dir():
            return [self.path.name], None
        index = self.path / INDEX_NAME
        if not index.exists():
            return sorted(p.name for p in self.path.glob("*.safetensors")), None
        data_bytes = sum(p.stat().st_size for p in self.path.glob("*.safetensors"))
        content = parse_json(read_metadata(index, data_bytes), str(index), data_bytes)
        said = Said(content, str(index)).at("weight_map").entries()
        weight_map = {name: file.text() for name, file in said.items()}
        names = sorted(set(weight_map.values()))
        if outside := [n for n in names if Path(n).name != n or not n]:
            raise CheckpointError(f"{index}: {short(outside[0])} is no file beside it")
        return names, weight_map

    def read(self, key: str, box: Box, out: Tensor) -> None:
        file, stored = self._places[key]
        if box.numel:
            whole = Box.whole(stored.shape)
            copy_box(file, stored.offset, whole, stored.dtype, box, box, out)

    def close(self) -> None:
        for file in self._files:
            file.close()


def pieces(source: Source, key: str, dtype: torch.dtype | None = None) -> Iterator[memoryview]:
    """A tensor's bytes from front to back."""
    info = source.tensors[key]
    whole = Box.whole(info.shape)
    if not info.shape:
        out = torch.empty((), dtype=dtype or info.dtype)
        source.read(key, whole, out)
        yield storage_bytes(out)
    if not whole.numel or not info.shape:
        return
    row_bytes = info.size_bytes // info.shape[0]
    step = max(1, PIECE_BYTES // row_bytes)
    for row in range(0, info.shape[0], step):
        box = whole.rows(row, min(row + step, info.shape[0]))
        out = torch.empty(box.size, dtype=dtype or info.dtype)
        source.read(key, box, out)
        yield storage_bytes(out)


Sized = tuple[str, torch.dtype, tuple[int, ...]]


def write_directory(
    directory: Path,
    tensors: list[Sized],
    content: Pieces,
    limit: int,
    beside: Mapping[str, bytes],
    only_file: str | None = None,
) -> None:
    """Writes tensors as such a directory: complete, or not there. `only_file`: in one file of that
    name, whatever the limit."""
    files = {only_file: lay_out(tensors, _METADATA)} if only_file else split(tensors, limit)
    saving = begin_directory(directory)
    try:
        for name, layout in files.items():
            write_pieces(saving / name, layout.size_bytes, layout.content(content))
        finish_directory(saving, directory, files, beside)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written: {error}") from None
    finally:
        store.discard(saving)


def begin_directory(directory: Path) -> Path:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory}: exists and is not empty; choose another directory")
    try:
        return store.begin(directory)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be made: {error.strerror}") from None


def split(tensors: list[Sized], limit: int) -> dict[str, FileLayout]:
    """Files of at most `limit` bytes each (a larger tensor has its own), in the given order."""
    groups: list[list[Sized]] = [[]]
    held = 0
    for name, dtype, shape in tensors:
        size = TensorInfo(dtype, shape).size_bytes
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append((name, dtype, shape))
        held += size
    if len(groups) == 1:
        return {"model.safetensors": lay_out(groups[0], _METADATA)}
    count = len(groups)
    return {
        f"model-{i:05d}-of-{count:05d}.safetensors": lay_out(group, _METADATA)
        for i, group in enumerate(groups, 1)
    }


def finish_directory(
    saving: Path, directory: Path, files: dict[str, FileLayout], beside: Mapping[str, bytes]
) -> None:
    for name, text in beside.items():
        write_synced(saving / name, text)
    if len(files) > 1:
        weight_map = {s.name: file for file, lay in files.items() for s in lay.tensors}
        total = sum(s.size_bytes for lay in files.values() for s in lay.tensors)
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: weight_map[name] for name in sorted(weight_map)},
        }
        write_synced(saving / INDEX_NAME, json.dumps(index, indent=2).encode())
    sync_directory(saving)
    if directory.exists():
        directory.rmdir()
    saving.rename(directory)
    sync_directory(directory.parent)
