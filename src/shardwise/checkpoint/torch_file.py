"""Files of `torch.save`, of both kinds, read without torch's own loader.

    zip      NAME/data.pkl and NAME/data/KEY, one for each storage, stored as they are
    before   pickles one after the other (a magic number, the protocol, the machine, the value,
             keys), then for each key the number of its elements and its bytes

torch's loader, also with `weights_only`, allocates what a file says that it holds. Here every
storage is a part of the mapped file, and a tensor a part of its storage, or the file is refused.
Tensors stay on the disk until they are read.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.bounded import counts, max_metadata_bytes, open_regular, shape_of, short
from shardwise.checkpoint.guarded import VALUES, load_next
from shardwise.checkpoint.said import records
from shardwise.errors import CheckpointError

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class _Storage:
    """Bytes of the file; None in a first pass, which only looks for the end of a pickle."""

    content: Tensor | None
    dtype: torch.dtype

    def tensor(self, offset: Any, size: Any, stride: Any, dtype: torch.dtype) -> Tensor | None:
        if self.content is None:
            return None
        shape, steps = shape_of(size, "a tensor"), counts(stride, "a tensor's strides", len(size))
        (start,) = counts([offset], "a tensor's offset")
        elements = self.content.numel() // dtype.itemsize
        last = start + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
        if 0 not in shape and last >= elements:
            raise CheckpointError(
                f"a tensor of shape {short(shape)} is not in its storage of {elements} elements"
            )
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        flat = self.content[: elements * dtype.itemsize]
        if flat.data_ptr() % dtype.itemsize or flat.storage_offset() % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).as_strided(
            shape, steps, flat.storage_offset() // dtype.itemsize + start
        )


def _tensor(storage: _Storage, offset: Any, size: Any, stride: Any, *_: Any) -> Tensor | None:
    return storage.tensor(offset, size, stride, storage.dtype)


def _tensor_of_dtype(
    storage: _Storage, offset: Any, size: Any, stride: Any, _: Any, __: Any, dtype: Any, *___: Any
) -> Tensor | None:
    return storage.tensor(offset, size, stride, dtype)


def _parameter(data: Tensor | None, *_: Any) -> Tensor | None:
    return data


def _of_type(rebuild: Any, _: Any, arguments: Any, *__: Any) -> Any:
    if rebuild not in (_tensor, _tensor_of_dtype, _parameter):
        raise CheckpointError("rebuilds what is no tensor")
    return rebuild(*arguments)


def _dtensor(*_: Any) -> Any:
    raise CheckpointError("holds a DTensor; give whole tensors")


_NAMES: dict[tuple[str, str], Any] = {
    **VALUES,
    **{(m, n): d for m in ("torch", "torch.storage") for n, d in _STORAGES.items()},
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    **records("torch.nn.parameter", "Parameter", "Buffer"),
    **records("torch", "Tensor"),
    **records("torch._tensor", "Tensor"),
    ("torch.distributed.tensor", "DTensor"): _dtensor,
    ("torch._utils", "_rebuild_wrapper_subclass"): _dtensor,
}


def load_torch(file: Path | bytearray, where: str, more: Mapping[Any, Any] | None = None) -> Any:
    """What `torch.save` wrote to a file, or to memory; `more` are further names (`records`)."""
    names = _NAMES | dict(more or {})
    try:
        content = _mapped(file) if isinstance(file, Path) else _viewed(file)
        head = content[:2].numpy().tobytes()
        return (_load_zip if head == b"PK" else _load_legacy)(content, where, names)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged zip can end in anything
        text = f"{type(error).__name__} {error}".splitlines()[0][:200]
        raise CheckpointError(f"{where}: refused, damaged or no torch.save file: {text}") from None


def _viewed(content: bytearray) -> Tensor:
    return torch.frombuffer(content or bytearray(1), dtype=torch.uint8)


def _mapped(path: Path) -> Tensor:
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            raise CheckpointError(f"{path}: is empty")
        storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", False, size)
    finally:
        os.close(descriptor)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class _Bytes(io.RawIOBase):
    """A tensor of bytes as a file for `zipfile`."""

    def __init__(self, content: Tensor) -> None:
        self._content, self._at = content.numpy(), 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._content.size)[whence]
        if self._at < 0:
            raise ValueError("negative position")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._content.size if size is None or size < 0 else self._at + size
        found = self._content[self._at : end].tobytes()
        self._at += len(found)
        return found


def _load_zip(content: Tensor, where: str, names: Any) -> Any:
    total = content.numel()
    _check_directory(content, where)
    with zipfile.ZipFile(_Bytes(content)) as archive:  # type: ignore[arg-type]
        entries = {i.filename: i for i in archive.infolist()}
    pickles = [n for n in entries if n.endswith("/data.pkl") and n.count("/") == 1]
    if len(pickles) != 1:
        raise CheckpointError(f"{where}: no torch.save file: it has {len(pickles)} data.pkl")
    prefix = pickles[0].removesuffix("data.pkl")

    def bytes_of(name: str) -> Tensor:
        info = entries.get(prefix + name)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise CheckpointError(f"{prefix}{name}: is not there, or not stored as it is")
        head = content[info.header_offset : info.header_offset + 30].numpy().tobytes()
        skip = 30 + sum(struct.unpack("<HH", head[26:30]))
        found = content[info.header_offset + skip :][: info.file_size]
        if head[:4] != b"PK\3\4" or found.numel() != info.file_size:
            raise CheckpointError(f"{prefix}{name}: lies outside of the file")
        return found

    def storage(pid: Any) -> _Storage:
        dtype, key, numel = _described(pid)
        found = bytes_of(f"data/{key}")
        if numel * dtype.itemsize > found.numel():
            raise CheckpointError(
                f"storage {key[:60]}: {numel} elements of {dtype} in {found.numel()} bytes"
            )
        return _Storage(found[: numel * dtype.itemsize], dtype)

    if f"{prefix}byteorder" in entries and bytes_of("byteorder").numpy().tobytes() != b"little":
        raise CheckpointError(f"{where}: was written on a machine of another byte order")
    data = bytes_of("data.pkl")
    if data.numel() > max_metadata_bytes(total):
        raise CheckpointError(f"{where}: a pickle of {data.numel():,} bytes is not read")
    return load_next(io.BytesIO(data.numpy().tobytes()), where, names, total, storage)


def _check_directory(content: Tensor, where: str) -> None:
    """The zip's directory is read at once, and takes many times its bytes."""
    start = max(0, content.numel() - 65_557 - 20)
    tail = content[start:].numpy().tobytes()
    at = tail.rfind(b"PK\5\6")
    (size,) = struct.unpack_from("<I", tail, at + 12) if at >= 0 else (0,)
    if size == 2**32 - 1 and tail[at - 20 : at - 16] == b"PK\6\7":
        (record,) = struct.unpack_from("<Q", tail, at - 12)
        (size,) = struct.unpack("<Q", content[record + 40 : record + 48].numpy().tobytes())
    if size > max(4 * 2**20, content.numel() // 16):
        raise CheckpointError(f"{where}: a zip directory of {size:,} bytes is not read")


def _load_legacy(content: Tensor, where: str, names: Any) -> Any:
    total = content.numel()
    head = io.BytesIO(content[: max_metadata_bytes(total)].numpy().tobytes())
    no_file = f"{where}: refused, damaged or no torch.save file"
    if [load_next(head, no_file, names, total) for _ in range(2)] != [_MAGIC, _PROTOCOL]:
        raise CheckpointError(no_file)
    load_next(head, where, names, total)  # the machine that wrote it
    begin, dtypes = head.tell(), dict[str, torch.dtype]()

    def note(pid: Any) -> _Storage:
        dtype, key, _ = _described(pid)
        dtypes[key] = dtype
        return _Storage(None, dtype)

    load_next(head, where, names, total, note)
    keys = load_next(head, where, names, total)
    places: dict[str, Tensor] = {}
    at = head.tell()
    if not isinstance(keys, list) or not all(isinstance(k, str) and k in dtypes for k in keys):
        raise CheckpointError(f"{where}: has bytes of unknown storages")
    for key in keys:
        numel = int.from_bytes(content[at : at + 8].numpy().tobytes(), "little")
        size = numel * dtypes[key].itemsize
        if at + 8 + size > total:
            raise CheckpointError(f"{where}: storage {short(key)} lies outside of the file")
        places[key] = content[at + 8 : at + 8 + size]
        at += 8 + size

    def storage(pid: Any) -> _Storage:
        dtype, key, numel = _described(pid)
        if key not in places or numel * dtype.itemsize > places[key].numel():
            raise CheckpointError(f"storage {key[:60]}: {numel} elements are not there")
        return _Storage(places[key], dtype)

    head.seek(begin)
    return load_next(head, where, names, total, storage)


def _described(pid: Any) -> tuple[torch.dtype, str, int]:
    kind, dtype, key, _, numel, *view = pid
    (numel,) = counts([numel], "a storage's size")
    if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
        raise CheckpointError("names a storage in a way that is not known")
    if any(v is not None for v in view):
        raise CheckpointError("names a view of a storage, as versions before 0.4 did")
    return dtype, key, numel
