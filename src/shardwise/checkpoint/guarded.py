"""Reading other people's pickles without running them, in bounded time and memory.

A pickle may name any function and have it called. Here every name is looked up in a list of what
checkpoints need, and stands for a function of our own, or for a `Record`, which only remembers what
it was given. A pickle may also be small and ask for much: its operations are counted, keys of
dictionaries are simple values (the hash of tuples in tuples takes for ever), and what comes out is
walked once (values in each other).
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.checkpoint.bounded import max_values, short
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.checkpoint.said import Record, records
from shardwise.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_KEYS = (str, int, float, complex, bytes, type(None), torch.dtype)
_MAX_DEPTH, _MAX_MET, _MAX_BITS = 64, 10**6, 1000
_COSTLY = {*pickle.REDUCE, *pickle.NEWOBJ, *pickle.BUILD, *pickle.EMPTY_DICT, *pickle.EMPTY_SET}


def _size(items: Any = ()) -> tuple[Any, ...]:
    return tuple(items) if isinstance(items, list | tuple) else (items,)


def _counter(items: Any = None) -> Counter[Any]:
    return Counter(items if isinstance(items, dict) else None)


def _set(items: Any = ()) -> set[Any]:
    return {checked_key(item) for item in items}


def _encode(text: str, *_: Any) -> bytes:
    return text.encode("latin1")


def _bytes(content: Any = b"", *_: Any) -> bytes:
    return _encode(content) if isinstance(content, str) else bytes(memoryview(content))


def _ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict((checked_key(key), value) for key, value in items)


def _dict(*_: Any) -> dict[Any, Any]:
    return {}


Names = Mapping[tuple[str, str], Any]
VALUES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _ordered,
    ("collections", "Counter"): _counter,
    ("collections", "defaultdict"): _dict,
    ("builtins", "set"): _set,
    ("builtins", "frozenset"): _set,
    ("__builtin__", "set"): _set,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): _bytes,
    ("__builtin__", "bytearray"): _bytes,
    ("_codecs", "encode"): _encode,
    **records("torch", "device"),
    **records("torch.serialization", "_get_layout"),
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()},
}
OF_DCP: dict[tuple[str, str], Any] = {
    **records(_METADATA, "Metadata", "TensorStorageMetadata", "TensorProperties"),
    **records(_METADATA, "BytesStorageMetadata", "ChunkStorageMetadata"),
    **records(_METADATA, "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    **records(_FILESYSTEM, "_StorageInfo", "_StoragePrefix"),
    **records("pathlib", "Path", "PosixPath", "PurePosixPath", "WindowsPath"),
    **records("pathlib._local", "PosixPath"),
    **VALUES,
}


def is_small(value: Any) -> bool:
    """Whether it is no number of hundreds of digits, which cannot be written, or become a float."""
    return not isinstance(value, int) or value.bit_length() <= _MAX_BITS


def checked_key(key: Any) -> Any:
    parts = key if type(key) is tuple else (key,)
    if not all(isinstance(part, (*_KEYS, Record)) and is_small(part) for part in parts):
        raise CheckpointError(f"has a key that is no simple value: {short(key)}")
    return key


_PYTHONS: Any = pickle._Unpickler  # type: ignore[attr-defined]
_STOP: Any = pickle._Stop  # type: ignore[attr-defined]


class Unpickler(_PYTHONS):
    """The one of the library that is written in Python: its memo is a dictionary, which no index
    can blow up."""

    def __init__(
        self,
        file: io.BytesIO,
        names: Names,
        data_bytes: int,
        storage: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self.read, self.readline = file.read, file.readline
        self._names, self._storage, self._left = names, storage, max_values(data_bytes)

    def load(self) -> Any:
        self.metastack, self.stack = [], []
        self.append = self.stack.append
        try:
            while True:
                code = self.read(1)
                if not code:
                    raise CheckpointError("ends before its end")
                self._left -= 3 if code[0] in _COSTLY else 1
                if self._left < 0:
                    raise CheckpointError("has too many values")
                _OPERATIONS[code[0]](self)
        except _STOP as end:
            check_tree(end.value)
            return end.value

    def find_class(self, module: str, name: str) -> Any:
        found = self._names.get((module, name))
        if found is None:
            raise CheckpointError(f"names {module}.{name}, which is not loaded from files")
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise CheckpointError("names a storage, of which there is none here")
        return self._storage(pid)

    def _frame(self) -> None:
        self.read(8)  # frames are for reading ahead

    def _build(self) -> None:
        state, held = self.stack.pop(), self.stack[-1]
        if isinstance(held, Record):
            held.state = state
        elif not isinstance(held, dict):  # of a dictionary's attributes nothing is needed
            raise CheckpointError(f"gives a {type(held).__name__} a state")

    def _setitems(self) -> None:
        self._put(self.pop_mark())

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._put(items)

    def _put(self, items: list[Any]) -> None:
        held = self.stack[-1]
        if not isinstance(held, dict):
            raise CheckpointError(f"gives a {type(held).__name__} items")
        for i in range(0, len(items), 2):
            held[checked_key(items[i])] = items[i + 1]

    def _additems(self) -> None:
        items = self.pop_mark()
        self.stack[-1].update(_set(items))

    def _frozenset(self) -> None:
        self.append(_set(self.pop_mark()))

    def _refused(self) -> None:
        raise CheckpointError("has an operation that no checkpoint needs")


_OPERATIONS: dict[int, Callable[[Any], None]] = {
    **_PYTHONS.dispatch,
    pickle.FRAME[0]: Unpickler._frame,
    pickle.BUILD[0]: Unpickler._build,
    pickle.SETITEM[0]: Unpickler._setitem,
    pickle.SETITEMS[0]: Unpickler._setitems,
    pickle.DICT[0]: Unpickler._dict,
    pickle.ADDITEMS[0]: Unpickler._additems,
    pickle.FROZENSET[0]: Unpickler._frozenset,
    **dict.fromkeys(b"\x82\x83\x84\x96\x97\x98i", Unpickler._refused),  # EXT, buffers, INST
}


def check_tree(value: Any) -> None:
    """Refuses values that lie deeper than 64, or that are more than a million when each is counted
    as often as it is met: those that hold themselves, or each other many times over."""
    open_values, met = [iter((value,))], 0
    while open_values:
        value = next(open_values[-1], open_values)
        if value is open_values:
            open_values.pop()
            continue
        met += 1
        if len(open_values) > _MAX_DEPTH or met > _MAX_MET:
            raise CheckpointError("holds values in each other too deep, or too many times")
        if isinstance(value, dict):
            open_values.append(iter(value.values()))
        elif isinstance(value, list | tuple | set):
            open_values.append(iter(value))
        elif isinstance(value, Record):
            open_values.append(iter((value.args, value.state)))
        elif not is_small(value):
            raise CheckpointError("holds a number of hundreds of digits")


def load_next(
    file: io.BytesIO, where: str, names: Names, data_bytes: int, storage: Any = None
) -> Any:
    """The pickle that begins where the file stands; CheckpointError for whatever is wrong."""
    try:
        return Unpickler(file, names, data_bytes, storage).load()
    except CheckpointError as error:
        raise CheckpointError(f"{where}: refused: {error}") from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle can end in anything
        text = f"{type(error).__name__} {error}".splitlines()[0][:200]
        raise CheckpointError(f"{where}: damaged, or no such pickle: {text}") from None
