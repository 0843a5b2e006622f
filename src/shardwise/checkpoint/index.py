"""index.json: what a checkpoint holds and where each part lies, under a strict schema.

    {"tensors": {"model.embed.weight": {
         "dtype": "F32", "shape": [512, 64], "dim": 0,
         "chunks": [{"file": "rank_00000.safetensors", "offset": 1312,
                     "start": [0, 0], "size": [256, 64]}, ...]}},
     "ties":    {"model.head.weight": "model.embed.weight"},
     "objects": {"optim.groups": ..., "step": 120, ...}}

Keys: `model.<name>`, `optim.<parameter>.<slot>`, `rng.<rank>.<kind>`. `dim` is the dim along which
the tensor was sharded, null for whole ones. The chunks of a tensor cover it exactly once. A tied
tensor is stored under one name. Objects are what `json_values` can say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.bounded import parse_json, short
from shardwise.checkpoint.boxes import Box, tiling_problem
from shardwise.checkpoint.dtypes import dtype_name, dtype_of
from shardwise.checkpoint.json_values import from_json, to_json
from shardwise.checkpoint.said import Said
from shardwise.errors import CheckpointError

INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as a whole; `dim` is the one along which it was sharded, None for whole ones."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int | None = None

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, contiguous in a file from byte `offset`."""

    file: str
    offset: int
    box: Box


@dataclass(frozen=True, slots=True)
class Index:
    tensors: dict[str, TensorInfo]
    chunks: dict[str, tuple[Chunk, ...]]
    ties: dict[str, str]
    objects: dict[str, Any]

    def to_bytes(self) -> bytes:
        tensors = {}
        for key in sorted(self.tensors):
            info = self.tensors[key]
            tensors[key] = {
                "dtype": dtype_name(info.dtype, key),
                "shape": info.shape,
                "dim": info.dim,
                "chunks": [
                    {"file": c.file, "offset": c.offset, "start": c.box.start, "size": c.box.size}
                    for c in self.chunks[key]
                ],
            }
        objects = {k: to_json(self.objects[k], k) for k in sorted(self.objects)}
        whole = {"tensors": tensors, "ties": self.ties, "objects": objects}
        return json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(
        cls, content: bytes | bytearray, where: str, file_sizes: Mapping[str, int]
    ) -> Index:
        """Reads and checks everything: dtypes, shapes, exact tiling, that chunks lie in files."""
        said = Said(parse_json(content, where, sum(file_sizes.values())), where)
        entries, tied, held = said.fields("tensors", "ties", "objects")
        tensors, chunks = {}, {}
        for key, entry in entries.entries().items():
            tensors[key], chunks[key] = _tensor(entry, file_sizes)
        ties = {alias: name.text() for alias, name in tied.entries().items()}
        for alias, name in ties.items():
            if name not in tensors or alias in tensors:
                raise CheckpointError(f"{where}: {alias} is tied to {short(name)}, no tensor")
        try:
            objects = {k: from_json(v.value, str(v)) for k, v in held.entries().items()}
        except RecursionError:
            raise CheckpointError(f"{where}: values lie in each other too deep") from None
        _check_objects(objects, where)
        return cls(tensors, chunks, ties, objects)


def _tensor(said: Said, file_sizes: Mapping[str, int]) -> tuple[TensorInfo, tuple[Chunk, ...]]:
    kind, size, dim, parts = said.fields("dtype", "shape", "dim", "chunks")
    dtype, shape = dtype_of(kind.value, str(said)), size.shape()
    info = TensorInfo(dtype, shape, None if dim.value is None else dim.count())
    if info.dim is not None and info.dim >= len(shape):
        raise CheckpointError(f"{said}: dim {info.dim} of shape {shape}")
    chunks = tuple(_chunk(c, dtype, file_sizes) for c in parts.parts())
    if problem := tiling_problem(shape, [c.box for c in chunks]):
        raise CheckpointError(f"{said}: {problem}")
    return info, chunks


def _chunk(said: Said, dtype: torch.dtype, file_sizes: Mapping[str, int]) -> Chunk:
    file, at, start, size = said.fields("file", "offset", "start", "size")
    name, offset, shape = file.text(), at.count(), size.shape()
    box = Box(start.counts(len(shape)), shape)
    if name not in file_sizes:
        raise CheckpointError(f"{said}: lies in {short(name)}, which the manifest does not have")
    if offset + box.numel * dtype.itemsize > file_sizes[name]:
        raise CheckpointError(
            f"{said}: {box.numel * dtype.itemsize} bytes at {offset} of {name}, which has "
            f"{file_sizes[name]}"
        )
    return Chunk(name, offset, box)


def _check_objects(objects: dict[str, Any], where: str) -> None:
    """Those that loading and exporting look into."""
    for key in ("extra", "about"):
        Said(objects.get(key, {}), f"{where}: {key}").of(dict)
    for value in Said(objects.get("beside", {}), f"{where}: beside").entries().values():
        value.text()
    for group in Said(objects.get("optim.groups", []), f"{where}: optim.groups").parts():
        [name.text() for name in group.at("params").parts()]
        if "params" in group.at("options").entries():
            raise group.wrong("other options")
