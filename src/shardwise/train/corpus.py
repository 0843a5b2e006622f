"""From files to memory-mapped tokens, split into a training and a held-out part that never overlap.

    text files   -> read once, exact duplicates dropped, joined by a zero byte -> a cache folder
    token files  -> mapped where they lie (.npy, or .bin of uint16 / uint8)

Text: whole files are held out, chosen by a hash of their names; with few files, a contiguous block
at the end. Token files: a contiguous block at the end. A cache is named by what it was made of
(paths, sizes, times, share held out); `cache` keeps it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import ConfigError
from shardwise.train.cache import cache_root, cached
from shardwise.train.sources import files_named

Tokens = np.ndarray[Any, np.dtype[Any]]

_FORMAT = 1  # raise it when the split or the joining changes: old caches are then not found
_MIN_FILES_TO_SPLIT = 20  # below, one held-out file could be most of the data
_SEPARATOR = b"\0"  # between documents: no text holds it
_SKIPPED_DIRS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token arrays of the two parts; `unit` is what one token is; `fingerprint` names the
    contents."""

    train: tuple[Tokens, ...]
    held_out: tuple[Tokens, ...]
    unit: str
    fingerprint: str


def open_corpus(
    source: str | tuple[str, ...], *, held_out: float, token_dtype: str, fallback_dir: Path
) -> Corpus:
    """Opens what `data.source` names; caches of text go to the user's cache folder, else
    `fallback_dir`."""
    paths = _stdlib_files() if source == "stdlib" else _named_files(source)
    tokens = [p for p in paths if p.suffix in (".bin", ".npy")]
    if tokens and len(tokens) < len(paths):
        other = next(p for p in paths if p not in tokens)
        raise ConfigError(f"data.source: mixes token files with text ({other}); give one kind")
    if tokens:
        return _open_token_files(tokens, held_out, token_dtype)
    root = Path(sysconfig.get_path("stdlib")) if source == "stdlib" else Path("/")
    return _open_text_files(paths, root, held_out, fallback_dir)


def _stdlib_files() -> list[Path]:
    """The standard library's own sources, without its tests (which some distributions leave
    out)."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in _walk(root) if p.suffix == ".py")
    if not files:
        raise ConfigError(
            f"data.source: no .py files in {root}: this Python comes without sources; name files"
        )
    return files


def _named_files(source: str | tuple[str, ...]) -> list[Path]:
    def inside(folder: Path) -> list[Path]:
        return sorted(p for p in _walk(folder) if _is_text_or_tokens(p))

    found = files_named(source, inside, "no text files in directory {path}")
    return [path.resolve() for path in found]


def _walk(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            d for d in subfolders if d not in _SKIPPED_DIRS and not d.startswith(".")
        )
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _is_text_or_tokens(path: Path) -> bool:
    return path.suffix in (".bin", ".npy") or b"\0" not in _read(path, 8192)


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise ConfigError(f"data.source: {path}: cannot be read: {error.strerror}") from None


# ---- token files


def _open_token_files(paths: list[Path], held_out: float, token_dtype: str) -> Corpus:
    arrays = [_map_tokens(p, token_dtype) for p in paths]
    total = sum(a.size for a in arrays)
    left = max(1, round(total * held_out))
    train: list[Tokens] = []
    kept: list[Tokens] = []
    for array in reversed(arrays):  # the held-out block is the end of the last files
        cut = max(0, array.size - left)
        left -= array.size - cut
        train.insert(0, array[:cut])
        kept.insert(0, array[cut:])
    digest = hashlib.blake2b(digest_size=16)
    for path, array in zip(paths, arrays, strict=True):
        digest.update(f"{path.name} {array.size} {array.dtype}".encode())
        for start in (
            0,
            array.size // 2,
            max(0, array.size - 2**16),
        ):  # a sample: files may be huge
            digest.update(array[start : start + 2**16].tobytes())
    digest.update(repr(held_out).encode())
    return Corpus(
        tuple(a for a in train if a.size),
        tuple(a for a in kept if a.size),
        "token",
        digest.hexdigest(),
    )


def _map_tokens(path: Path, token_dtype: str) -> Tokens:
    if not path.stat().st_size:
        raise ConfigError(f"data.source: {path}: is empty")
    if path.suffix == ".bin":
        width = np.dtype(token_dtype).itemsize
        if path.stat().st_size % width:
            raise ConfigError(
                f"data.source: {path}: its size is no multiple of {width} ({token_dtype})"
            )
        return _map(path, token_dtype)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.source: {path}: cannot be read as a .npy array: {error}") from None
    if array.dtype.kind not in "ui" or array.ndim != 1:
        raise ConfigError(
            f"data.source: {path}: holds {array.dtype} of shape {array.shape}; "
            "expected one dimension of integers"
        )
    return array


def _map(path: Path, dtype: str) -> Tokens:
    try:
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise ConfigError(f"data.source: {path}: cannot be read: {error.strerror}") from None


# ---- text files


def _open_text_files(paths: list[Path], root: Path, held_out: float, fallback: Path) -> Corpus:
    try:
        listing = [
            (str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns) for p in paths
        ]
    except OSError as error:
        raise ConfigError(
            f"data.source: {error.filename}: cannot be read: {error.strerror}"
        ) from None
    key = hashlib.blake2b(
        json.dumps([_FORMAT, held_out, str(root), listing]).encode(), digest_size=16
    ).hexdigest()
    folder, names = cache_root(fallback) / key, [name for name, _, _ in listing]
    info = cached(folder, lambda work: _write_parts(work, paths, names, held_out))
    parts = [_map(folder / f"{part}.bin", "uint8") for part in ("train", "held_out")]
    return Corpus((parts[0],), (parts[1],), "byte", info["fingerprint"])


def _write_parts(
    work: Path, paths: list[Path], names: list[str], held_out: float
) -> dict[str, Any]:
    documents = _distinct_documents(paths, names)
    total = sum(len(text) + 1 for _, text in documents)
    if not total:
        raise ConfigError("data.source: all of its files are empty")
    if len(documents) >= _MIN_FILES_TO_SPLIT:
        chosen = _held_out_names(documents, total * held_out)
        train = _join(text for name, text in documents if name not in chosen)
        kept = _join(text for name, text in documents if name in chosen)
    else:
        joined = _join(text for _, text in documents)
        cut = len(joined) - max(1, round(len(joined) * held_out))
        train, kept = joined[:cut], joined[cut:]
    digest = hashlib.blake2b(len(train).to_bytes(8, "little") + train + kept, digest_size=16)
    (work / "train.bin").write_bytes(train)
    (work / "held_out.bin").write_bytes(kept)
    return {"fingerprint": digest.hexdigest(), "documents": len(documents)}


def _distinct_documents(paths: list[Path], names: list[str]) -> list[tuple[str, bytes]]:
    """Non-empty files, each content once: a copy must not be trained on and held out at the same
    time."""
    seen: set[bytes] = set()
    documents = []
    for path, name in zip(paths, names, strict=True):
        text = _read(path)
        if b"\0" in text[:8192]:
            raise ConfigError(f"data.source: {path}: is neither text nor a .bin or .npy token file")
        content = hashlib.blake2b(text, digest_size=16).digest()
        if text and content not in seen:
            seen.add(content)
            documents.append((name, text))
    return documents


def _held_out_names(documents: list[tuple[str, bytes]], wanted: float) -> set[str]:
    """Files in the order of their names' hashes until `wanted` bytes are reached; at least one, not
    all."""
    ranked = sorted(documents, key=lambda d: hashlib.blake2b(d[0].encode()).digest())
    chosen: set[str] = set()
    size = 0
    for name, text in ranked[:-1]:
        if size >= wanted:
            break
        chosen.add(name)
        size += len(text) + 1
    return chosen


def _join(texts: Iterator[bytes]) -> bytes:
    return b"".join(text + _SEPARATOR for text in texts)
