"""Copies of a run's state in the memory of its hosts: what a killed rank, or a lost host, leaves.

    /dev/shm/.../<run>/step_00000037/     of the same format as on disk, on each host:
        rank_00002.safetensors ...        what its own ranks hold
        rank_00000.safetensors ...        and a copy of what those of the host before it hold
        index.json, manifest.json         of all files of all hosts

Files in memory outlive the processes that wrote them. With one host there is one copy, with more
there are two, on neighbours: a copy is whole as long as for every file one host is left. It counts
when all hosts have written theirs; only then is the one before it deleted, so two stand for a while
and a kill at any moment leaves one. A start compares what the hosts hold, verifies every block, and
moves only the files that a host needs and lacks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.checkpoint import store
from shardwise.checkpoint.files import free_bytes, replace_file, text_of
from shardwise.checkpoint.hosts import Hosts
from shardwise.checkpoint.index import INDEX
from shardwise.checkpoint.loading import files_to_read
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.source import CheckpointSource
from shardwise.checkpoint.state import Optimizers, State
from shardwise.checkpoint.store import MANIFEST, Checkpoint
from shardwise.checkpoint.wire import Move, move_files
from shardwise.checkpoint.writing import write_state
from shardwise.errors import CheckpointError

OWNER = "owner"  # a file beside the copies
MARK = "copies in memory of shardwise"  # its first line


@dataclass(frozen=True, slots=True)
class _Held:
    """What one host has of one copy; `digest` tells copies of one step apart."""

    step: int
    digest: str
    all_files: set[str]
    files: set[str]


class MemoryCopies:
    """The copies of one run. All methods but `folder` are collective.

    Args:
        folder: the run's own folder in memory, which need not exist; its parent must.
        ranks: all ranks of the job.
        owner: whose copies these are; a folder of another owner (a run directory was copied) holds
            none, and is left alone.
    """

    def __init__(self, folder: Path, ranks: Ranks, owner: str) -> None:
        self.folder, self._ranks, self._owner = folder, ranks, owner
        self._hosts = Hosts.by_folder(ranks, folder.parent)
        # By host: the whole files of the copy that `latest` found.
        self._files: list[set[str]] = [set() for _ in self._hosts.groups]

    def claim(self) -> None:
        """Makes the folder on each host, and takes away what a killed save left."""

        def claim() -> None:
            self._make()
            store.clean(self.folder)

        self._hosts.on_leaders(claim)

    def _make(self) -> None:
        """The folder on this host: with its owner at once, or not at all."""
        if not os.path.lexists(self.folder):
            draft = self.folder.with_name(f".new_{self.folder.name}")
            draft.mkdir(mode=0o700, exist_ok=True)
            replace_file(draft / OWNER, self._owner.encode())
            draft.rename(self.folder)
        if not _belongs(self.folder, self._owner):
            raise CheckpointError(
                f"{self.folder}: holds copies of another run, or something else; name another "
                "folder in SHARDWISE_MEMORY_DIR, or set checkpoint.memory_every = 0"
            )

    # -- saving ----------------------------------------------------------------------------------
    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Optimizers = None,
        *,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Copies the state of `step`, then deletes the copy before it. CheckpointError, with that
        one untouched, if there is no room on a host."""
        rank = self._ranks.rank
        state = self._ranks.on_each(lambda: State.of_run(rank, model, optimizers, None, extra))
        final = self.folder / store.step_name(step)
        # The first copy asks for the room of two: later ones need it while they are written.
        copies = 1 if any(self.folder.glob("step_*")) else 2
        write_state(state, final, step, self._hosts, lambda size: self._check_room(copies * size))
        self._hosts.on_leaders(lambda: store.keep_only(final))

    def _check_room(self, needed: int) -> None:
        free = min(free_bytes(self.folder.parent), _available_bytes())
        if needed > free:
            raise CheckpointError(
                f"rank {self._ranks.rank}: copies in memory need {needed:,} bytes and {free:,} are "
                f"free in {self.folder.parent} (two stand while one is written); enlarge it "
                "(mount -o remount,size=..., docker run --shm-size=...), remove what other runs "
                "left there, name another folder in SHARDWISE_MEMORY_DIR, or set "
                "checkpoint.memory_every = 0"
            )

    def clear(self) -> None:
        """Gives the memory back, on all hosts."""
        self._hosts.on_leaders(lambda: discard(self.folder, self._owner))

    # -- finding ---------------------------------------------------------------------------------
    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest copy of which the hosts together hold every file whole, and what is wrong
        with files and newer copies. Of its files, `bring` gets those that are needed."""
        by_host, unread = zip(*self._hosts.on_leaders(self._list), strict=True)
        messages: list[str] = [text for texts in unread for text in texts]
        for step, digest in sorted({(h.step, h.digest) for held in by_host for h in held})[::-1]:
            held = [next((h for h in row if h.digest == digest), None) for row in by_host]
            path, damaged = self.folder / store.step_name(step), self._damaged(step, held)
            messages += [text for texts in damaged for text in texts.values()]
            pairs = zip(held, damaged, strict=True)
            whole = [h.files - texts.keys() if h else set[str]() for h, texts in pairs]
            wanted = next(h.all_files for h in held if h)
            if lost := wanted - set().union(*whole):
                messages.append(f"{path}: no host has {', '.join(sorted(lost))} whole")
                continue
            self._files = whole
            return self._open(path, [h is not None for h in held]), messages
        return None, messages

    def _list(self) -> tuple[list[_Held], list[str]]:
        """What this host has: files of the right size, not read yet; and what cannot be listed."""
        found, messages = [], []
        if not _belongs(self.folder, self._owner):
            return [], []
        for path in self.folder.glob("step_*"):
            try:
                manifest = store.read_manifest(path)
            except CheckpointError as error:
                messages.append(str(error))
                continue
            sizes = {file.name: file.stat().st_size for file in path.iterdir()}
            here = {n for n, entry in manifest.files.items() if sizes.get(n) == entry.size_bytes}
            digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
            found.append(_Held(manifest.step, digest, set(manifest.files), here))
        return found, messages

    def _damaged(self, step: int, held: list[_Held | None]) -> list[dict[str, str]]:
        """By host, what is wrong with which files; the ranks of a host share the reading."""
        own, group = held[self._hosts.own], self._hosts.group

        def verify() -> dict[str, str]:
            if own is None:
                return {}
            manifest = store.read_manifest(self.folder / store.step_name(step))
            mine = replace(manifest, files={name: manifest.files[name] for name in own.files})
            part = group.index(self._ranks.rank)
            return store.damaged_files(mine, part, len(group))

        found = self._ranks.on_all(verify)
        return [
            {name: text for rank in group for name, text in found[rank].items()}
            for group in self._hosts.groups
        ]

    def _open(self, path: Path, has_manifest: list[bool]) -> Checkpoint:
        """The copy at `path` on every host, its index included."""
        own, first = self._hosts.own, has_manifest.index(True)
        manifest = path / MANIFEST
        content = self._hosts.on_leaders(lambda: manifest.read_bytes() if own == first else b"")

        def write() -> None:
            if not has_manifest[own]:
                self._make()
                store.discard(path)  # another copy of the same step, which is not whole
                path.mkdir()
                replace_file(manifest, content[first])

        self._hosts.on_leaders(write)
        checkpoint = self._ranks.on_each(lambda: store.read_manifest(path))
        self._bring(checkpoint, [{INDEX} for _ in self._hosts.groups])
        return checkpoint

    def bring(self, checkpoint: Checkpoint, model: nn.Module) -> None:
        """What ranks will read of the copy that `latest` found, to fill this (sharded) model and
        its optimizers, comes to their hosts."""
        groups = self._hosts.groups
        source = self._ranks.on_each(lambda: CheckpointSource(checkpoint))
        source.close()
        names = self._ranks.on_all(lambda: files_to_read(source, model, self._ranks.rank))
        self._bring(checkpoint, [set().union(*(names[r] for r in group)) for group in groups])

    def _bring(self, checkpoint: Checkpoint, wanted: list[set[str]]) -> None:
        moves: list[Move] = []
        groups, files = self._hosts.groups, checkpoint.files
        for host, names in enumerate(wanted):
            for name in sorted(names - self._files[host]):
                # Of the ranks that can, another one each time.
                turn, targets = len(moves), groups[host]
                sources = [r for h, g in enumerate(groups) if name in self._files[h] for r in g]
                pair = sources[turn % len(sources)], targets[turn % len(targets)]
                moves.append(Move(name, files[name], *pair))
        coming = sum(m.entry.size_bytes for m in moves if m.target in self._hosts.group)
        self._ranks.on_all(lambda: self._check_room(coming))
        move_files(moves, self._ranks, checkpoint.path)
        for held, names in zip(self._files, wanted, strict=True):
            held |= names


def discard(folder: Path, owner: str) -> None:
    """Gives the memory of copies back if they are this owner's; whatever else stands there stays.
    It goes aside first, its owner goes last: a kill at any moment leaves something that is known.
    """
    aside = folder.with_name(f".deleting_{folder.name}")
    if _belongs(folder, owner) and not os.path.lexists(aside):
        with contextlib.suppress(FileNotFoundError):  # another rank of this host was faster
            folder.rename(aside)
    if not _belongs(aside, owner):
        return
    with contextlib.suppress(OSError):  # what cannot be deleted waits for the next start
        for path in aside.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != OWNER:
                path.unlink()
        (aside / OWNER).unlink()
        aside.rmdir()


def _belongs(folder: Path, owner: str) -> bool:
    """Is it a folder (no link to one) of this user, marked as that owner's?"""
    mark = folder / OWNER
    try:
        found = [path.lstat() for path in (folder, mark)]
        kinds = [stat.S_IFMT(entry.st_mode) for entry in found]
        if kinds != [stat.S_IFDIR, stat.S_IFREG] or {e.st_uid for e in found} != {os.getuid()}:
            return False
        return mark.read_text() == owner
    except (OSError, UnicodeDecodeError):
        return False


def _available_bytes() -> int:
    """What the machine can give without swapping: a folder in memory may promise more."""
    found = re.search(r"MemAvailable: +(\d+) kB", text_of(Path("/proc/meminfo")))
    return int(found[1]) * 1024 if found else 2**63
