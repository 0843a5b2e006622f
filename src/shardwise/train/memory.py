"""Where a run keeps its copies in memory, and which of them are its own.

    /dev/shm/shardwise-<user id>/     or SHARDWISE_MEMORY_DIR
        9f86d081884c7d65/             the name stands in `memory_id` of one run directory
            owner                     the path of that run directory
            step_00000037/            see checkpoint/memory.py

A start that continues from a copy in memory goes on under its name; every other start takes a new
one. So a copy is found only by the run that made it, and never once that run has gone on from
somewhere else. Folders that no run directory names any more are removed by whoever starts next.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from shardwise.checkpoint import store
from shardwise.checkpoint.files import replace_file, text_of
from shardwise.checkpoint.memory import OWNER, MemoryCopies
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import CheckpointError
from shardwise.train.config import Config
from shardwise.train.run_dir import RunDir

VARIABLE, MEMORY_ID = "SHARDWISE_MEMORY_DIR", "memory_id"


def memory_dir() -> Path:
    """The folder of all runs of this user on this host."""
    return Path(os.environ.get(VARIABLE) or f"/dev/shm/shardwise-{os.getuid()}")


def find_copies(run_dir: RunDir, ranks: Ranks) -> MemoryCopies | None:
    """The copies that an earlier start of the run may have left; None where a host has no folder
    for them. Collective."""
    name = ranks.on_rank0(lambda: text_of(run_dir.path / MEMORY_ID))
    usable = name and not any(ranks.on_all(_problem))
    return _copies(name, run_dir, ranks) if usable else None


def keep_copies(
    config: Config, run_dir: RunDir, ranks: Ranks, continued: MemoryCopies | None
) -> MemoryCopies | None:
    """Where this start keeps its copies: with those that it continues from, or under a new name;
    None without `checkpoint.memory_every`. Collective; CheckpointError where it cannot work."""
    copies = continued
    if copies is None:
        if config.checkpoint.memory_every:
            ranks.on_each(_check)
        name = ranks.on_rank0(lambda: _new_name(config, run_dir))
        copies = _copies(name, run_dir, ranks) if name else None
    if copies is not None:
        copies.claim()
    ranks.on_each(_remove_stale)
    return copies


def _new_name(config: Config, run_dir: RunDir) -> str:
    """Written before anything is saved under it: what lies under the one before is nobody's."""
    file = run_dir.path / MEMORY_ID
    name = secrets.token_hex(8) if config.checkpoint.memory_every else ""
    if name or file.exists():
        replace_file(file, name.encode())
    return name


def _copies(name: str, run_dir: RunDir, ranks: Ranks) -> MemoryCopies:
    return MemoryCopies(memory_dir() / name, ranks, owner=str(run_dir.path.resolve()))


def _check() -> None:
    if problem := _problem():
        text = f"{problem}; name a folder in memory in {VARIABLE}, or set it to 0"
        raise CheckpointError(f"checkpoint.memory_every: {text}")


def _problem() -> str:
    """Why the folder cannot be used; it is made if need be."""
    folder = memory_dir()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}"
    # Everybody may make folders in /dev/shm; what lies in this one becomes weights.
    return "" if owner == os.getuid() else f"{folder} belongs to user {owner}"


def _remove_stale() -> None:
    """Folders of runs that are gone, or have another name for their copies by now. One whose run
    directory cannot be looked for, on a disk that is not mounted, stays."""
    for folder in memory_dir().glob("*"):
        run_dir = Path(text_of(folder / OWNER))
        can_tell = run_dir.name and run_dir.parent.is_dir()
        if can_tell and text_of(run_dir / MEMORY_ID) != folder.name:
            store.discard(folder)
