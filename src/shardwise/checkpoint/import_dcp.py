"""Checkpoints of torch.distributed.checkpoint (FSDP2, torchtitan, our format 1), read without its
unpickling.

`.metadata` names every tensor's chunks, and for each of these a span of a `.distcp` file that holds
one `torch.save` archive. Chunks are read one at a time.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.boxes import Box, tiling_problem
from shardwise.checkpoint.files import CheckedFile
from shardwise.checkpoint.guarded import Record, load_torch, read_dcp_metadata
from shardwise.checkpoint.import_torch import collect_objects, our_key, weights_only
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.store import MANIFEST
from shardwise.errors import CheckpointError

METADATA = ".metadata"


class DcpSource:
    """See the module docstring."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ties: dict[str, str] = {}
        self._files: dict[str, CheckedFile] = {}
        self._last: tuple[Any, Tensor] | None = None
        try:
            self._read_metadata(read_dcp_metadata(path / METADATA))
        except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
            raise CheckpointError(f"{path / METADATA}: not as expected: {error}") from None

    def _read_metadata(self, metadata: Any) -> None:
        paths = getattr(metadata, "planner_data", None) or {}
        is_ours = (self.path / MANIFEST).exists()  # format 1: names as they are today
        spans: dict[str, dict[tuple[int, ...] | None, Any]] = {}
        for index, info in metadata.storage_data.items():
            start = getattr(index, "offset", None)  # fields at their defaults are not pickled
            offset = tuple(start) if start is not None else None
            spans.setdefault(index.fqn, {})[offset] = info
        tensors: dict[str, tuple[TensorInfo, list[tuple[Box, Any]]]] = {}
        objects: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            path = tuple(paths.get(name, (name,)))
            key = name if is_ours else our_key(path, str(self.path))
            if hasattr(entry, "chunks"):
                tensors[key] = self._tensor(name, entry, spans.get(name, {}))
            else:
                objects[key] = self._item(name, spans[name][None])
        tensors = weights_only(tensors)
        self.tensors = {key: info for key, (info, _) in tensors.items()}
        self._chunks = {key: chunks for key, (_, chunks) in tensors.items()}
        self.objects = collect_objects(objects)

    def _tensor(
        self, name: str, entry: Any, spans: dict[Any, Any]
    ) -> tuple[TensorInfo, list[tuple[Box, Any]]]:
        shape = tuple(entry.size)
        chunks = []
        for chunk in entry.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            span = spans.get(box.start, spans.get(None))
            if span is None:
                raise CheckpointError(f"{self.path}: {name}: the part at {box.start} is nowhere")
            chunks.append((box, span))
        if problem := tiling_problem(shape, [box for box, _ in chunks]):
            raise CheckpointError(f"{self.path}: {name}: {problem}")
        dtype = next(v for v in _values(entry.properties) if isinstance(v, torch.dtype))
        return TensorInfo(dtype, shape), chunks

    def _item(self, name: str, span: Any) -> Any:
        if getattr(span, "transform_descriptors", None):
            raise CheckpointError(
                f"{self.path}: {name}: is compressed or encrypted; save it without extensions"
            )
        if span.relative_path not in self._files:
            if Path(span.relative_path).name != span.relative_path:
                raise CheckpointError(f"{self.path}: {name}: lies at {span.relative_path!r}")
            self._files[span.relative_path] = CheckedFile(self.path / span.relative_path)
        content = self._files[span.relative_path].read(span.offset, span.length)
        return load_torch(io.BytesIO(content), f"{self.path / span.relative_path}: {name}")

    def read(self, key: str, box: Box, out: Tensor) -> None:
        for stored, span in self._chunks[key]:
            if not box.size:
                out.copy_(self._chunk(key, stored, span))
            elif (wanted := stored.meet(box)) is not None:
                chunk = self._chunk(key, stored, span)
                out[wanted.slices_in(box)].copy_(chunk[wanted.slices_in(stored)])

    def _chunk(self, key: str, stored: Box, span: Any) -> Tensor:
        if self._last is None or self._last[0] is not span:
            self._last = None  # one chunk at a time
            value = self._item(key, span)
            info = self.tensors[key]
            if (
                not isinstance(value, Tensor)
                or tuple(value.shape) != stored.size
                or value.dtype != info.dtype
            ):
                raise CheckpointError(
                    f"{self.path}: {key}: expected {info.dtype} {stored.size}, found "
                    f"{getattr(value, 'dtype', type(value))} {tuple(getattr(value, 'shape', ()))}"
                )
            self._last = (span, value)
        return self._last[1]

    def close(self) -> None:
        self._last = None
        for file in self._files.values():
            file.close()
        self._files.clear()


def _values(value: Any) -> Iterator[Any]:
    """All that a record was given."""
    if isinstance(value, Record):
        for inner in vars(value).values():
            yield from _values(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(inner)
    else:
        yield value
