"""Writes a state from all ranks into one directory: complete, or not there.

    1  every rank says what it holds; all compute who writes what         (plan)
    2  sizes against the free space, and space reserved                   nothing is written yet
    3  each rank writes its file, block by block, and syncs it            rank_%05d.safetensors
    4  rank 0 writes index.json, then the manifest, then renames          (store)

An error of one rank, at any point, is raised on all of them as a CheckpointError, and what was
written is removed.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.checkpoint import store
from shardwise.checkpoint.dtypes import dtype_of
from shardwise.checkpoint.files import CheckedWriter, FileEntry, write_checked
from shardwise.checkpoint.index import INDEX, Chunk, Index
from shardwise.checkpoint.placement import local_part, storage_bytes
from shardwise.checkpoint.plan import Part, Plan, make_plan, parts_of
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.safetensors_file import FileLayout, lay_out
from shardwise.checkpoint.state import State
from shardwise.errors import CheckpointError

_RESERVE_BYTES, _PER_PART_BYTES = 2**16, 256  # index, manifest and directories


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def write_state(state: State, final: Path, step: int, ranks: Ranks) -> Path:
    """Collective. Returns the path of the complete checkpoint."""
    saving: Path | None = None
    try:
        plan = make_plan(ranks.on_all(lambda: parts_of(state.tensors)))
        _check_space(plan, final, ranks)
        saving = ranks.on_rank0(lambda: store.begin(final))
        entries = ranks.on_all(lambda: _write_own(state, plan, saving, ranks.rank))
        files = dict(e for e in entries if e is not None)
        return ranks.on_rank0(lambda: _finish(state, plan, saving, step, files))
    except RuntimeError as error:  # CheckpointError, or what `Ranks` makes of a rank's error
        if saving is not None and ranks.rank == 0:
            store.discard(saving)
        text = (
            f"the checkpoint of step {step} could not be written to {final.parent}: {error}; "
            "earlier checkpoints are untouched"
        )
        raise ranks.agreed(CheckpointError(text), ranks.reporter) from error


def _check_space(plan: Plan, final: Path, ranks: Ranks) -> None:
    """Before anything is written, on every rank: the directory is one for all of them."""
    sizes = [p.size_bytes + _PER_PART_BYTES for parts in plan.parts for p in parts]
    needed = sum(sizes) + _RESERVE_BYTES

    def check() -> None:
        existing = final.parent
        while not existing.exists():
            existing = existing.parent
        found = os.statvfs(existing)
        free = found.f_bavail * found.f_frsize
        if needed > free:
            raise CheckpointError(
                f"rank {ranks.rank}: {needed:,} bytes are needed and {free:,} are free on the "
                f"disk of {existing}; free some, or lower checkpoint.keep (the checkpoints that "
                "are to be deleted stay until the new one is complete)"
            )

    ranks.on_all(check)


def _layout(parts: tuple[Part, ...]) -> FileLayout:
    entries = [(_name_in_file(p), dtype_of(p.dtype, p.key), p.box.size) for p in parts]
    return lay_out(entries, {"format": "pt"})


def _name_in_file(part: Part) -> str:
    """The key itself for whole tensors, so that other tools find them under their names."""
    if part.box.size == part.shape:
        return part.key
    return f"{part.key}@{','.join(map(str, part.box.start))}"


def _write_own(state: State, plan: Plan, saving: Path, rank: int) -> tuple[str, FileEntry] | None:
    parts = plan.parts[rank]
    if not parts:
        return None
    layout, by_name = _layout(parts), {_name_in_file(p): p for p in parts}
    writer = CheckedWriter(saving / file_name(rank), layout.size_bytes)
    try:
        writer.write(layout.header)
        for stored in layout.tensors:
            key = by_name[stored.name].key
            local, _, _ = local_part(state.tensors[key], key)
            if local.numel():  # one tensor at a time comes from the device
                writer.write(storage_bytes(local.cpu().contiguous()))
        return file_name(rank), writer.finish()
    finally:
        writer.abandon()


def _finish(state: State, plan: Plan, saving: Path, step: int, files: dict[str, FileEntry]) -> Path:
    content = make_index(state, plan, step).to_bytes()
    files[INDEX] = write_checked(saving / INDEX, content)
    return store.commit(saving, step, len(plan.parts), files)


def make_index(state: State, plan: Plan, step: int) -> Index:
    """Offsets follow from the plan: no rank has to send its own."""
    chunks: dict[str, list[Chunk]] = {key: [] for key in plan.tensors}
    for rank, parts in enumerate(plan.parts):
        by_name = {_name_in_file(p): p for p in parts}
        for stored in _layout(parts).tensors if parts else ():
            part = by_name[stored.name]
            chunks[part.key].append(Chunk(file_name(rank), stored.offset, part.box))
    ordered = {key: tuple(sorted(c, key=lambda c: c.box)) for key, c in chunks.items()}
    return Index(plan.tensors, ordered, dict(sorted(state.ties.items())), state.objects)
