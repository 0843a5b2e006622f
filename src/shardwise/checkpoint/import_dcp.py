"""Checkpoints of torch.distributed.checkpoint (FSDP2, torchtitan, our format 1), read without its
unpickling.

`.metadata` names every tensor's chunks, and for each of these a span of a `.distcp` file that holds
one `torch.save` archive. Chunks are read one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.bounded import counts, max_metadata_bytes, shape_of
from shardwise.checkpoint.boxes import Box, tiling_problem
from shardwise.checkpoint.files import CheckedFile
from shardwise.checkpoint.guarded import Record, read_dcp_metadata
from shardwise.checkpoint.import_torch import Found, our_key
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.store import MANIFEST
from shardwise.checkpoint.torch_file import load_torch
from shardwise.errors import CheckpointError

METADATA = ".metadata"


class DcpSource:
    """See the module docstring."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ties: dict[str, str] = {}
        self._files: dict[str, CheckedFile] = {}
        self._last: tuple[Any, Tensor] | None = None
        self._objects_bytes = 0
        self._data_bytes = sum(p.stat().st_size for p in path.glob("*.distcp"))
        try:
            self._read_metadata(read_dcp_metadata(path / METADATA, self._data_bytes))
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
        found = Found(str(self.path))
        for name, entry in metadata.state_dict_metadata.items():
            parts = tuple(paths.get(name, (name,)))
            key = name if is_ours else our_key(parts, str(self.path))
            if hasattr(entry, "chunks"):
                found.add_tensor(key, parts, self._tensor(name, entry, spans.get(name, {})))
            else:
                found.add_object(key, parts, self._object(name, spans[name][None]))
        tensors = found.weights()
        self.tensors = {key: info for key, (info, _) in tensors.items()}
        self._chunks = {key: chunks for key, (_, chunks) in tensors.items()}
        self.objects = found.values()

    def _object(self, name: str, span: Any) -> Any:
        """A value that is no tensor; all of them stay."""
        self._objects_bytes += counts([span.length], name)[0]
        if self._objects_bytes > max_metadata_bytes(self._data_bytes):
            raise CheckpointError(f"{self.path}: {name}: its values are too many to be read")
        return self._item(name, span)

    def _tensor(
        self, name: str, entry: Any, spans: dict[Any, Any]
    ) -> tuple[TensorInfo, list[tuple[Box, Any]]]:
        shape = shape_of(entry.size, f"{self.path}: {name}")
        chunks = []
        for chunk in entry.chunks:
            where = f"{self.path}: {name}: a part"
            box = Box(counts(chunk.offsets, where), shape_of(chunk.sizes, where))
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
                raise CheckpointError(f"{self.path}: {name}: lies at {span.relative_path[:60]!r}")
            self._files[span.relative_path] = CheckedFile(self.path / span.relative_path)
        offset, length = counts([span.offset, span.length], f"{self.path}: {name}")
        content = self._files[span.relative_path].read(offset, length)
        return load_torch(content, f"{self.path / span.relative_path}: {name}")

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
