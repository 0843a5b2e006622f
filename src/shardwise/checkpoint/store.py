"""Checkpoint directories on disk: what counts as complete, how one appears and how old ones go.

    checkpoints/
        step_00000100/          complete: manifest.json, written last, lists sizes and CRC-32s
        .saving_step_00000200/  being written; renamed to step_00000200 once complete
        .deleting_...           being deleted: renamed first, so that half of one never counts

Files and directories are synced before each rename, so `kill -9` or a power cut at any moment
leaves every earlier checkpoint as it was. Nothing here imports torch or knows what the files hold.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_FORMAT = 1
_STEP = re.compile(r"step_(\d{8,})")
_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: its sizes agree with its manifest (contents: `damaged_files`)."""

    path: Path
    step: int
    manifest: dict[str, Any]

    @property
    def files(self) -> dict[str, dict[str, int]]:
        return self.manifest["files"]

    @property
    def world_size(self) -> int:
        return self.manifest["world_size"]


@dataclass(frozen=True, slots=True)
class Listing:
    """Complete checkpoints, newest first, and (directory name, message) of each that is not."""

    complete: tuple[Checkpoint, ...]
    skipped: tuple[tuple[str, str], ...]


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`; ValueError with the reason if it is incomplete or damaged."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: incomplete (no {MANIFEST})") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: damaged ({MANIFEST}: {error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise ValueError(f"{path}: not a checkpoint of format {_FORMAT}")
    for name, entry in manifest["files"].items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            raise ValueError(f"{path}: damaged ({name} is missing)") from None
        if found != entry["size_bytes"]:
            raise ValueError(
                f"{path}: damaged ({name} has {found} bytes instead of {entry['size_bytes']})"
            )
    return Checkpoint(path, manifest["step"], manifest)


def list_checkpoints(directory: Path) -> Listing:
    complete: list[Checkpoint] = []
    skipped: list[tuple[str, str]] = []
    for path in sorted(directory.glob("step_*"), reverse=True):
        if not _STEP.fullmatch(path.name):
            continue
        try:
            complete.append(read_checkpoint(path))
        except ValueError as error:
            skipped.append((path.name, str(error)))
    complete.sort(key=lambda c: c.step, reverse=True)
    return Listing(tuple(complete), tuple(skipped))


def begin(directory: Path, step: int) -> Path:
    """An empty directory to write the checkpoint of `step` into."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f".saving_step_{step:08d}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def commit(saving: Path, step: int, world_size: int, files: dict[str, dict[str, int]]) -> Path:
    """Makes a written directory count: manifest last, then the rename. Returns its final path."""
    manifest = {"format": _FORMAT, "step": step, "world_size": world_size, "files": files}
    write_synced(saving / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync_directory(saving)
    final = saving.parent / f"step_{step:08d}"
    if final.exists():  # an incomplete or damaged one: resuming never saves a complete step again
        _delete(final)
    saving.rename(final)
    sync_directory(final.parent)
    return final


def prune(directory: Path, keep: int) -> None:
    """Deletes complete checkpoints beyond the `keep` newest (0: none); never the last complete
    one."""
    complete = list_checkpoints(directory).complete
    for old in complete[keep:] if keep > 0 else ():
        _delete(old.path)


def clean(directory: Path) -> None:
    """Removes what a killed run left half-written or half-deleted."""
    for pattern in (".saving_step_*", ".deleting_step_*"):
        for path in directory.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def describe_files(paths: Iterable[Path]) -> dict[str, dict[str, int]]:
    """Manifest entries of files."""
    return {p.name: {"size_bytes": p.stat().st_size, "crc32": _crc32(p)} for p in sorted(paths)}


def damaged_files(checkpoint: Checkpoint, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """Names of files whose contents differ from the manifest; reads every `num_parts`-th, from
    `part`."""
    damaged = []
    for name in sorted(checkpoint.files)[part::num_parts]:
        try:
            if _crc32(checkpoint.path / name) != checkpoint.files[name]["crc32"]:
                damaged.append(name)
        except OSError:
            damaged.append(name)
    return damaged


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file so that readers, and a crash, see the old or the new content, never a
    mixture."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_synced(temporary, content)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    aside = path.with_name(f".deleting_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
