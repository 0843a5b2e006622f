"""Reading other people's pickles without running them.

torch.distributed.checkpoint keeps its metadata in a pickle, and a pickle may name any function and
have it called. Here every name is looked up in a list of what such metadata needs, and stands for a
`Record`, which only remembers what it was given. Contents of `torch.save` files go through
`torch.load(weights_only=True)`, which has a list of its own; `records` adds names to it that become
records too.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.dtypes import DTYPES
from shardwise.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"


class Record:
    """What stands for an object of a class that is not to be loaded: its arguments and state."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


_RECORDS = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties")),
    *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((_FILESYSTEM, name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")),
    ("pathlib._local", "PosixPath"),
    ("torch.serialization", "_get_layout"),
}
_VALUES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return Record
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        raise CheckpointError(f"names {module}.{name}, which such metadata has no use for")


def read_dcp_metadata(path: Path) -> Any:
    """The `.metadata` of torch.distributed.checkpoint as records."""
    try:
        return _Unpickler(io.BytesIO(path.read_bytes())).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: refused: {error}") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle can end in anything
        raise CheckpointError(f"{path}: damaged, or no such metadata: {error}") from None


def load_torch(file: Path | io.BytesIO, where: str, records: Iterable[str] = ()) -> Any:
    """`torch.load` that runs nothing; a file's tensors stay on the disk until they are read."""
    allowed: list[Any] = [(Record, name) for name in records]
    try:
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(file, io.BytesIO):
                return torch.load(file, map_location="cpu", weights_only=True)
            is_zip = zipfile_like(file)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # noqa: BLE001 - a damaged pickle can end in anything
        text = str(error)
        hint = text[text.find("Unsupported global") :].split("\n")[0] if "global" in text else text
        raise CheckpointError(
            f"{where}: refused, damaged or no torch.save file: {hint.splitlines()[0][:300]}"
        ) from None


def zipfile_like(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"PK"
