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

from shardwise.checkpoint.bounded import counts, parse_json, shape_of, short
from shardwise.checkpoint.boxes import Box, tiling_problem
from shardwise.checkpoint.dtypes import dtype_name, dtype_of
from shardwise.checkpoint.json_values import from_json, to_json
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
                "shape": list(info.shape),
                "dim": info.dim,
                "chunks": [
                    {
                        "file": c.file,
                        "offset": c.offset,
                        "start": list(c.box.start),
                        "size": list(c.box.size),
                    }
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
        value = parse_json(content, where, sum(file_sizes.values()))
        parts = _fields(value, {"tensors": dict, "ties": dict, "objects": dict}, where)
        tensors, chunks = {}, {}
        for key, entry in parts["tensors"].items():
            tensors[key], chunks[key] = _tensor(entry, f"{where}: {key}", file_sizes)
        for alias, name in parts["ties"].items():
            if not isinstance(name, str) or name not in tensors or alias in tensors:
                text = f"{alias} is tied to {short(name)}, which is no tensor"
                raise CheckpointError(f"{where}: {text}")
        try:
            objects = {k: from_json(v, f"{where}: {k}") for k, v in parts["objects"].items()}
        except RecursionError:
            raise CheckpointError(f"{where}: values lie in each other too deep") from None
        return cls(tensors, chunks, dict(parts["ties"]), objects)


def _tensor(
    entry: Any, where: str, file_sizes: Mapping[str, int]
) -> tuple[TensorInfo, tuple[Chunk, ...]]:
    kinds = {"dtype": str, "shape": list, "dim": (int, type(None)), "chunks": list}
    fields = _fields(entry, kinds, where)
    dtype, shape = dtype_of(fields["dtype"], where), shape_of(fields["shape"], where)
    info = TensorInfo(dtype, shape, fields["dim"])
    if info.dim is not None and not 0 <= info.dim < len(shape):
        raise CheckpointError(f"{where}: dim {info.dim} of shape {shape}")
    chunks = tuple(_chunk(c, where, dtype, file_sizes) for c in fields["chunks"])
    if problem := tiling_problem(shape, [c.box for c in chunks]):
        raise CheckpointError(f"{where}: {problem}")
    return info, chunks


def _chunk(value: Any, where: str, dtype: torch.dtype, file_sizes: Mapping[str, int]) -> Chunk:
    kinds = {"file": str, "offset": int, "start": list, "size": list}
    fields = _fields(value, kinds, where)
    box = Box(counts(fields["start"], where), shape_of(fields["size"], where))
    if len(box.start) != len(box.size):
        raise CheckpointError(f"{where}: a part at {box.start} of size {box.size}")
    name, offset = fields["file"], fields["offset"]
    if name not in file_sizes:
        text = f"lies in {short(name)}, which the manifest does not have"
        raise CheckpointError(f"{where}: {text}")
    if offset < 0 or offset + box.numel * dtype.itemsize > file_sizes[name]:
        raise CheckpointError(
            f"{where}: {box.numel * dtype.itemsize} bytes at {offset} of {name}, which has "
            f"{file_sizes[name]}"
        )
    return Chunk(name, offset, box)


def _fields(value: Any, kinds: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise CheckpointError(f"{where}: expected the keys {sorted(kinds)}, found {found}")
    for key, kind in kinds.items():
        if not isinstance(value[key], kind) or isinstance(value[key], bool):
            raise CheckpointError(f"{where}: {key} is {short(value[key])}")
    return value
