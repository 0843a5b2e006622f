"""Folders of prepared data that are made once: whole or absent, built by one process while others
wait, pruned by age and size.

A folder is named by a hash of what it was made of. It is built in a temporary one beside it and
renamed. `info.json` holds what the builder says, and size and checksum of every file: whoever opens
it reads all of them, and a damaged folder is built again. Building one removes those that were not
opened for long, or are too much; whoever has one mapped keeps it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from shardwise.errors import ConfigError

INFO = "info.json"
_NAME = re.compile(r"[0-9a-f]{32}(\.\w+)?")  # with an ending: being built
_BLOCK = 2**22
_KEPT_S, _ABANDONED_S, _KEPT_BYTES = 30 * 86400, 86400, 10 * 2**30


def cache_root(fallback: Path) -> Path:
    """The user's cache folder; `fallback`, told, where there is none to write to (containers,
    read-only homes)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    root = Path(base) / "shardwise" / "data"
    why = "no permission to write"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK):
            return root
    except OSError as error:
        why = error.strerror
    fallback.mkdir(parents=True, exist_ok=True)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        text = f"data: the cache folder {root} cannot be used ({why}); the cache is {fallback}"
        print(f"{text}. XDG_CACHE_HOME names another place", flush=True)
    return fallback


def cached(
    folder: Path,
    write: Callable[[Path], dict[str, Any]],
    waiting: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """What `info.json` of the folder says. Where there is none, `write(work)` puts files into a
    temporary folder and returns it. `waiting` is called where another process builds just now."""
    if not is_sound(folder):
        _build(folder, write, waiting)
        prune(folder)
    os.utime(folder)
    return json.loads((folder / INFO).read_text())


def is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / INFO).read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def is_sound(folder: Path) -> bool:
    """Whole, and every byte is what was written."""
    if not is_whole(folder):
        return False
    try:
        sums = json.loads((folder / INFO).read_text())["checksums"]
        return all(_checksum(folder / name) == value for name, value in sums.items())
    except (OSError, ValueError, KeyError):
        return False


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def _build(
    folder: Path, write: Callable[[Path], dict[str, Any]], waiting: Callable[[], None] | None
) -> None:
    lock_file = folder.parent / f"{folder.name}.lock"
    with lock_file.open("a+") as lock:
        if _has_waited(lock, waiting) and (mistake := _read_all(lock)):
            raise ConfigError(mistake)  # as the builder: another try would end alike
        if is_sound(folder):
            return
        work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            info = write(work)
            files = list(work.iterdir())
            info["sizes"] = {file.name: _synced(file) for file in files}
            info["checksums"] = {file.name: _checksum(file) for file in files}
            (work / INFO).write_text(json.dumps(info))
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
            work.rename(folder)
        except ConfigError as error:
            lock_file.unlink(missing_ok=True)  # those who wait have it open; nobody else finds it
            print(error, file=lock, end="", flush=True)
            raise
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _has_waited(lock: TextIO, waiting: Callable[[], None] | None) -> bool:
    """Takes the lock: one process builds, the others find it built."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        if waiting is not None:
            waiting()
        fcntl.flock(lock, fcntl.LOCK_EX)
        return True


def _read_all(lock: TextIO) -> str:
    lock.seek(0)
    return lock.read()


def _synced(file: Path) -> int:
    """Its size, once it is on the disk."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return file.stat().st_size


def prune(used: Path) -> None:
    """Removes caches beside `used` that nobody opened for 30 days, then the oldest until the rest
    is below 10 GiB, and what a killed build left."""
    now, total, aged = time.time(), 0, []
    for path in used.parent.iterdir():
        with contextlib.suppress(OSError):  # another process prunes too
            if path != used and path.is_dir() and _NAME.fullmatch(path.name):
                aged.append((path.stat().st_mtime, path))
    for opened, path in sorted(aged, reverse=True):
        with contextlib.suppress(OSError):
            total += sum(file.stat().st_size for file in path.iterdir())
            keep_s = _KEPT_S if is_whole(path) else _ABANDONED_S
            if now - opened > keep_s or total > _KEPT_BYTES:
                shutil.rmtree(path, ignore_errors=True)
