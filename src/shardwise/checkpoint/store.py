"""Checkpoint directories on disk: what counts as complete, how one appears and how old ones go.

    checkpoints/
        step_00000100/          complete: manifest.json, written last, lists sizes and checksums
        .saving_step_00000200/  being written; renamed to step_00000200 once complete
        .deleting_...           being deleted: renamed first, so that half of one never counts

Where a step is saved again, the old directory goes aside first; a kill just then leaves a
`.saving_` that is complete and counts too.

Files and directories are synced before each rename, so `kill -9` or a power cut at any moment
leaves every earlier checkpoint as it was. The manifest's first line is the checksum of the rest of
it. Nothing here imports torch or knows what the files hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.bounded import parse_json, read_metadata
from shardwise.checkpoint.files import CheckedFile, FileEntry, sync_directory, write_synced
from shardwise.checkpoint.said import Said
from shardwise.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 2
_STEP = re.compile(r"step_(\d{8,})")
_FIRST_LINE = re.compile(rb'\{"checksum": "([0-9a-f]{64})",')
_FORMAT_1 = re.compile(rb'\{[^{}]*"format": *1\b')
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: its sizes agree with its manifest (contents: `verify`)."""

    path: Path
    step: int
    world_size: int
    files: dict[str, FileEntry]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files.values())

    def open(self, name: str) -> CheckedFile:
        if name not in self.files:
            raise CheckpointError(f"{self.path}: {name} is not in its {MANIFEST}")
        return CheckedFile(self.path / name, self.files[name])


@dataclass(frozen=True, slots=True)
class Listing:
    """Complete checkpoints, newest first, and (directory name, message) of each that is not."""

    complete: tuple[Checkpoint, ...]
    skipped: tuple[tuple[str, str], ...]


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`; CheckpointError with the reason if it is incomplete or damaged."""
    checkpoint = read_manifest(path)
    for name, entry in checkpoint.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            raise CheckpointError(f"{path}: damaged ({name} is missing)") from None
        if found != entry.size_bytes:
            raise CheckpointError(
                f"{path}: damaged ({name} has {found} bytes instead of {entry.size_bytes})"
            )
    return checkpoint


def read_manifest(path: Path) -> Checkpoint:
    """The same from the manifest alone: not all of its files need be here."""
    try:
        data_bytes = sum(p.stat().st_size for p in path.iterdir() if p.is_file())
        if not (path / MANIFEST).exists():
            raise CheckpointError(f"{path}: incomplete (no {MANIFEST})")
        content = read_metadata(path / MANIFEST, data_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such directory") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {MANIFEST} cannot be read: {error.strerror}") from None
    return _checked(path, _parse_manifest(path, content, data_bytes))


def _parse_manifest(path: Path, content: bytes, data_bytes: int) -> Said:
    first, _, rest = content.partition(b"\n")
    match = _FIRST_LINE.fullmatch(first)
    if match is None:
        if _FORMAT_1.search(content):  # torch.distributed.checkpoint's inside
            raise CheckpointError(
                f"{path}: is of format 1; `shardwise checkpoint import {path} NEW` makes it one of "
                f"format {FORMAT}"
            )
        raise CheckpointError(f"{path}: damaged ({MANIFEST} does not begin with its checksum)")
    if hashlib.sha256(rest).hexdigest().encode() != match[1]:
        raise CheckpointError(f"{path}: damaged ({MANIFEST} has another checksum than it says)")
    where = str(path / MANIFEST)
    said = Said(parse_json(content, where, data_bytes), where)
    if (found := said.at("format").count()) != FORMAT:
        raise CheckpointError(f"{path}: is of format {found}, this version reads {FORMAT}")
    return said


def _checked(path: Path, said: Said) -> Checkpoint:
    files = said.at("files").entries()
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{said}: names {name!r}, which is no file name")
    entries = {name: FileEntry.from_json(entry) for name, entry in files.items()}
    return Checkpoint(path, said.at("step").count(), said.at("world_size").count(), entries)


def list_checkpoints(directory: Path) -> Listing:
    complete: list[Checkpoint] = []
    skipped: list[tuple[str, str]] = []
    for path in sorted(directory.glob("step_*"), reverse=True):
        if not _STEP.fullmatch(path.name):
            continue
        try:
            complete.append(read_checkpoint(path))
        except CheckpointError as error:
            skipped.append((path.name, str(error)))
    complete += _between_renames(directory)
    complete.sort(key=lambda c: c.step, reverse=True)
    return Listing(tuple(complete), tuple(skipped))


def _between_renames(directory: Path) -> list[Checkpoint]:
    """Complete ones whose last rename did not happen; see the module docstring."""
    found = []
    for path in directory.glob(".saving_step_*"):
        with contextlib.suppress(CheckpointError):
            if not _final(path).exists():
                found.append(read_checkpoint(path))
    return found


def _final(saving: Path) -> Path:
    return saving.with_name(saving.name.removeprefix(".saving_"))


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def begin(final: Path) -> Path:
    """An empty directory to write the checkpoint `final` into, beside it."""
    final.parent.mkdir(parents=True, exist_ok=True)
    path = final.with_name(f".saving_{final.name}")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def commit(saving: Path, step: int, world_size: int, files: dict[str, FileEntry]) -> Path:
    """Makes a written directory count: manifest last, then the rename. Returns its final path."""
    manifest = {
        "format": FORMAT,
        "step": step,
        "world_size": world_size,
        "files": {name: files[name].to_json() for name in sorted(files)},
    }
    rest = json.dumps(manifest, indent=1).encode().removeprefix(b"{\n")
    first = b'{"checksum": "%s",' % hashlib.sha256(rest).hexdigest().encode()
    write_synced(saving / MANIFEST, first + b"\n" + rest)
    sync_directory(saving)
    final = _final(saving)
    old = final.with_name(f".deleting_{final.name}")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    saving.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return final


def discard(saving: Path) -> None:
    """What could not be finished gives its space back."""
    shutil.rmtree(saving, ignore_errors=True)


def prune(directory: Path, keep: int) -> None:
    """Deletes complete checkpoints beyond the `keep` newest (0: none); never the last complete
    one."""
    complete = list_checkpoints(directory).complete
    for old in complete[keep:] if keep > 0 else ():
        _delete(old.path)


def keep_only(final: Path) -> None:
    """Deletes all other steps beside a checkpoint, whole or not."""
    for path in final.parent.glob("step_*"):
        if path != final:
            _delete(path)


def clean(directory: Path) -> None:
    """Removes what a killed run left half-written or half-deleted, and ends what lacked only its
    last rename."""
    for checkpoint in _between_renames(directory):
        checkpoint.path.rename(_final(checkpoint.path))
        sync_directory(directory)
    for pattern in (".saving_*", ".deleting_*", ".rehearsal_*"):
        for path in directory.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def verify(checkpoint: Checkpoint, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """What is wrong with the contents, a line for each damaged file; reads every `num_parts`-th
    block, from `part`."""
    return list(damaged_files(checkpoint, part, num_parts).values())


def damaged_files(checkpoint: Checkpoint, part: int, num_parts: int) -> dict[str, str]:
    """The same by the names of the files."""
    damaged = {}
    for name in sorted(checkpoint.files):
        try:
            with checkpoint.open(name) as file:
                file.verify(part, num_parts)
        except CheckpointError as error:
            damaged[name] = str(error)
    return damaged


def _delete(path: Path) -> None:
    aside = path.with_name(f".deleting_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
