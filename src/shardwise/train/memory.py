"""Where a run keeps its copies in memory, and which of them are its own.

    /dev/shm/shardwise-<user id>/     or SHARDWISE_MEMORY_DIR
        9f86d081884c7d65/             the name stands in `memory_id` of one run directory
            owner                     a mark, the path and the inode of that run directory
            step_00000037/            see checkpoint/memory.py

A start that continues from a copy in memory goes on under its name; every other start takes a new
one. So a copy is found only by the run that made it, and never once that run has gone on from
somewhere else. The folder belongs to others too (other runs, containers that share /dev/shm), so
nobody looks around in it: a start removes what stands under the names that `memory_id` keeps from
earlier starts, where the owner is this run directory, and nothing else.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from shardwise.checkpoint.files import replace_file, text_of
from shardwise.checkpoint.memory import MARK, MemoryCopies, discard
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import CheckpointError
from shardwise.train.config import Config
from shardwise.train.run_dir import RunDir

VARIABLE, MEMORY_ID = "SHARDWISE_MEMORY_DIR", "memory_id"
_NAME = re.compile("[0-9a-f]{16}")
_KEPT_NAMES = 32  # earlier starts, whose folders some host may still have


def memory_dir() -> Path:
    """The folder of all runs of this user on this host."""
    return Path(os.environ.get(VARIABLE) or f"/dev/shm/shardwise-{os.getuid()}")


def find_copies(run_dir: RunDir, ranks: Ranks) -> MemoryCopies | None:
    """The copies that an earlier start of the run may have left; None where a host has no folder
    for them. Collective."""
    name, *_ = ranks.on_rank0(lambda: _names(run_dir))
    usable = name and not any(ranks.on_all(_problem))
    return _copies(name, run_dir, ranks) if usable else None


def has_copies(run_dir: RunDir) -> bool:
    """On this host, by their names alone."""
    name, *_ = _names(run_dir)
    return bool(name) and any((memory_dir() / name).glob("step_*"))


def keep_copies(
    config: Config, run_dir: RunDir, ranks: Ranks, continued: MemoryCopies | None
) -> MemoryCopies | None:
    """Where this start keeps its copies: with those that it continues from, or under a new name;
    None without `checkpoint.memory_every`. Collective; CheckpointError where it cannot work."""
    if continued is None and config.checkpoint.memory_every:
        ranks.on_each(_check)
    names = ranks.on_rank0(lambda: _take_name(config, run_dir, is_new=continued is None))
    name, *earlier = names
    copies = continued
    if copies is None and name:
        copies = _copies(name, run_dir, ranks)
    if copies is not None:
        copies.claim()
    owner = _owner(run_dir, ranks)
    ranks.on_each(lambda: [discard(memory_dir() / old, owner) for old in earlier])
    return copies


def _names(run_dir: RunDir) -> list[str]:
    """What this run's folders are called: now (empty: none), and at earlier starts."""
    now, *earlier = text_of(run_dir.path / MEMORY_ID).split("\n")
    is_name = _NAME.fullmatch
    return [now if is_name(now) else "", *filter(is_name, earlier)]


def _take_name(config: Config, run_dir: RunDir, *, is_new: bool) -> list[str]:
    """Written before anything is saved under it: what lies under the one before is nobody's."""
    file, names = run_dir.path / MEMORY_ID, _names(run_dir)
    if is_new:
        name = secrets.token_hex(8) if config.checkpoint.memory_every else ""
        names = [name, *filter(None, names)][: _KEPT_NAMES + 1]
        if name or file.exists():
            replace_file(file, "\n".join(names).encode())
    return names


def _copies(name: str, run_dir: RunDir, ranks: Ranks) -> MemoryCopies:
    return MemoryCopies(memory_dir() / name, ranks, owner=_owner(run_dir, ranks))


def _owner(run_dir: RunDir, ranks: Ranks) -> str:
    """A run directory that was copied has another inode, also where its path is the same (in
    another container). Collective."""

    def owner() -> str:
        path = run_dir.path.resolve()
        return f"{MARK}\n{path}\n{path.stat().st_ino}"

    return ranks.on_rank0(owner)


def _check() -> None:
    if problem := _problem():
        text = f"{problem}; name a folder in memory in {VARIABLE}, or set it to 0"
        raise CheckpointError(f"checkpoint.memory_every: {text}")


def _problem() -> str:
    """Why the folder cannot be used; it is made if need be."""
    folder = memory_dir()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        # Everybody may make names in /dev/shm, links too; what lies there becomes weights.
        found = folder.stat() if os.environ.get(VARIABLE) else folder.lstat()
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder"
    return "" if found.st_uid == os.getuid() else f"{folder} belongs to user {found.st_uid}"
