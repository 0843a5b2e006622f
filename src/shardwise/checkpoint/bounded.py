"""Limits for what others wrote: what it says of itself is compared with what is there, first.

files      regular ones only: a FIFO would hang, a device would never end
metadata   at most 16 MiB and a million values, or what a large file deserves; before parsing
shapes     whole numbers that torch can hold
tensors    in all at most twice the bytes on disk and 64 MiB: nothing grows out of nothing
"""

from __future__ import annotations

import itertools
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError

_MAX_BYTES, _MAX_VALUES = 16 * 2**20, 10**6
_SLACK_BYTES = 64 * 2**20
_MAX_DIMS, _MAX_TENSORS = 64, 2**15


def max_metadata_bytes(data_bytes: int) -> int:
    """Of metadata beside, or in, `data_bytes` of data."""
    return max(_MAX_BYTES, data_bytes // 64)


def max_values(data_bytes: int) -> int:
    return max(_MAX_VALUES, data_bytes // 1024)


def open_regular(path: Path) -> int:
    """A descriptor to read from; CheckpointError for what is no regular file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: is no regular file")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be opened: {text}") from None


def read_metadata(path: Path, data_bytes: int = 0) -> bytes:
    """A small file, whole."""
    with open(open_regular(path), "rb", closefd=True) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_metadata_bytes(data_bytes):
            raise CheckpointError(
                f"{path}: {size:,} bytes of metadata; at most {max_metadata_bytes(data_bytes):,} "
                "are read"
            )
        return file.read(size)


def parse_json(content: bytes | bytearray, where: str, data_bytes: int = 0) -> Any:
    """JSON whose size was looked at first, in which each name stands once and no number has more
    than 303 digits; CheckpointError where it is none."""
    values = content.count(b",") + content.count(b":")
    values += 4 * (content.count(b"{") + content.count(b"["))  # containers take more memory
    if len(content) > max_metadata_bytes(data_bytes) or values > max_values(data_bytes):
        raise CheckpointError(
            f"{where}: {len(content):,} bytes of metadata with {values:,} values; at most "
            f"{max_metadata_bytes(data_bytes):,} and {max_values(data_bytes):,} are read"
        )
    try:
        return json.loads(content, object_pairs_hook=_no_duplicates, parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: no JSON: {error}") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _whole_number(digits: str) -> int:
    if len(digits) > 303:  # it would be no float
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def counts(value: Any, where: str, length: int | None = None) -> tuple[int, ...]:
    """Whole numbers, from a list or tuple."""
    is_list = isinstance(value, list | tuple) and all(type(n) is int and n >= 0 for n in value)
    if not is_list or length not in (None, len(value)):
        raise CheckpointError(f"{where}: expected whole numbers, found {short(value)}")
    return tuple(value)


def shape_of(value: Any, where: str) -> tuple[int, ...]:
    """A shape that a tensor can have."""
    shape = counts(value, where)
    if len(shape) > _MAX_DIMS or math.prod(n or 1 for n in shape) >= 2**59:
        raise CheckpointError(f"{where}: no tensor has the shape {short(value)}")
    return shape


def short(value: Any) -> str:
    """A few words of a value, for a message."""
    if isinstance(value, list | tuple | dict | set | frozenset):
        first = [_shorter(v) for v in itertools.islice(value, 8)]
        return f"a {type(value).__name__} of {len(value)}: {first}"
    return _shorter(value)


def _shorter(value: Any) -> str:
    is_short = isinstance(value, int) and abs(value) < 10**18
    is_plain = is_short or value is None or isinstance(value, float | str | bytes)
    return repr(value[:60] if isinstance(value, str | bytes) else value) if is_plain else "..."


def check_total(num: int, size_bytes: int, on_disk_bytes: int, where: str) -> None:
    """Refuses tensors that are much more than what they are said to lie in."""
    if num > max(_MAX_TENSORS, on_disk_bytes // 1024):
        raise CheckpointError(f"{where}: names {num:,} tensors in {on_disk_bytes:,} bytes")
    if size_bytes > 2 * on_disk_bytes + _SLACK_BYTES:
        raise CheckpointError(
            f"{where}: names {size_bytes:,} bytes of tensors and has {on_disk_bytes:,} bytes "
            "(expanded tensors, or parts that lie in one place; save contiguous ones)"
        )
