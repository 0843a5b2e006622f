"""Checkpoints of torch.distributed.checkpoint (FSDP2, torchtitan, our format 1), read without its
unpickling.

`.metadata` names every tensor's chunks, and for each of these a span of a `.distcp` file that holds
one `torch.save` archive. Its records are checked as a whole before anything else is read; chunks
are read one at a time.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.bounded import max_metadata_bytes, read_metadata
from shardwise.checkpoint.boxes import Box, tiling_problem
from shardwise.checkpoint.files import CheckedFile
from shardwise.checkpoint.guarded import OF_DCP, load_next
from shardwise.checkpoint.import_torch import Found, our_key
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.said import Said
from shardwise.checkpoint.store import MANIFEST
from shardwise.checkpoint.torch_file import load_torch
from shardwise.errors import CheckpointError

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a file beside the metadata, which hold one item."""

    file: str
    offset: int
    length: int


_Tensor = tuple[TensorInfo, list[tuple[Box, _Span]]]  # with where its parts lie
_Spans = dict[tuple[int, ...] | None, _Span]  # of a name, by the start of the part


def _entries(said: Said) -> dict[str, _Tensor | _Span]:
    """What `.metadata` says of each name; a value that is no tensor is one span."""
    spans: dict[str, _Spans] = {}
    for index, info in said.at("storage_data").of(dict).items():
        place = Said(index, said, "a place").record("MetadataIndex")
        start = place.get("offset")  # fields at their defaults are not pickled
        name = place.at("fqn").text()
        of_name = spans.setdefault(name, {})
        offset = start.shape() if start.value is not None else None
        if offset in of_name:
            raise CheckpointError(f"{place}: stands there twice")
        of_name[offset] = _span(Said(info, place, name).record("_StorageInfo"))
    found: dict[str, _Tensor | _Span] = {}
    for name, entry in said.at("state_dict_metadata").entries().items():
        held = spans.get(name, {})
        if entry.kind != "BytesStorageMetadata":
            found[name] = _tensor(entry.record("TensorStorageMetadata"), held)
        else:
            found[name] = Said(held.get(None), entry, "its place").of(_Span)
    return found


def _span(said: Said) -> _Span:
    if said.get("transform_descriptors", ()).parts():
        raise CheckpointError(f"{said}: is compressed or encrypted; save it without extensions")
    file = said.at("relative_path").text()
    if Path(file).name != file:
        raise said.wrong("a file beside it")
    return _Span(file, said.at("offset").count(), said.at("length").count())


def _tensor(said: Said, spans: _Spans) -> _Tensor:
    shape, chunks = said.at("size").shape(), []
    parts = said.at("chunks").parts()
    for part in parts:
        chunk = part.record("ChunkStorageMetadata")
        size = chunk.at("sizes").shape()
        box = Box(chunk.at("offsets").counts(len(size)), size)
        span = spans.get(box.start, spans.get(None) if len(parts) == 1 else None)
        chunks.append((box, Said(span, chunk, "its place").of(_Span)))
    if problem := tiling_problem(shape, [box for box, _ in chunks]):
        raise CheckpointError(f"{said}: {problem}")
    properties = said.at("properties").record("TensorProperties").parts()
    if not properties:
        raise said.wrong("a dtype")
    return TensorInfo(properties[0].of(torch.dtype), shape), chunks


def _path(said: Said) -> tuple[str | int, ...]:
    return tuple(k.count() if isinstance(k.value, int) else k.text() for k in said.parts())


class DcpSource:
    """See the module docstring."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ties: dict[str, str] = {}
        self._files: dict[str, CheckedFile] = {}
        self._last: tuple[_Span, Any] | None = None
        data_bytes = sum(p.stat().st_size for p in path.glob("*.distcp"))
        where, content = str(path / METADATA), read_metadata(path / METADATA, data_bytes)
        metadata = load_next(io.BytesIO(content), where, OF_DCP, data_bytes)
        said = Said(metadata, where).record("Metadata")
        planned, entries = said.get("planner_data", {}).entries(), _entries(said)
        paths = {name: _path(keys) for name, keys in planned.items()}
        is_ours = (path / MANIFEST).exists()  # format 1: names as they are today
        found, left = Found(str(path)), max_metadata_bytes(data_bytes)
        for name, entry in entries.items():
            parts = paths.get(name) or (name,)
            key = name if is_ours else our_key(parts, str(path))
            if isinstance(entry, tuple):
                found.add(key, parts, entry, True)
                continue
            left -= entry.length  # values stay
            if left < 0:
                raise CheckpointError(f"{path}: {name}: its values are too many to be read")
            found.add(key, parts, self._item(name, entry), False)
        self._tensors: dict[str, _Tensor] = found.weights()
        self.tensors = {key: info for key, (info, _) in self._tensors.items()}
        self.objects = found.values()

    def _item(self, name: str, span: _Span) -> Any:
        if span.file not in self._files:
            self._files[span.file] = CheckedFile(self.path / span.file)
        content = self._files[span.file].read(span.offset, span.length)
        return load_torch(content, f"{self.path / span.file}: {name}")

    def read(self, key: str, box: Box, out: Tensor) -> None:
        for stored, span in self._tensors[key][1]:
            if not box.size:
                out.copy_(self._chunk(key, stored, span))
            elif (wanted := stored.meet(box)) is not None:
                chunk = self._chunk(key, stored, span)
                out[wanted.slices_in(box)].copy_(chunk[wanted.slices_in(stored)])

    def _chunk(self, key: str, stored: Box, span: _Span) -> Tensor:
        if self._last is None or self._last[0] != span:
            self._last = None  # one chunk at a time
            self._last = (span, self._item(key, span))
        value, dtype = self._last[1], self.tensors[key].dtype
        found = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else type(value)
        if found != (wanted := (dtype, stored.size)):
            raise CheckpointError(f"{self.path}: {key}: expected {wanted}, found {found}")
        return value

    def close(self) -> None:
        self._last = None
        for file in self._files.values():
            file.close()
        self._files.clear()
