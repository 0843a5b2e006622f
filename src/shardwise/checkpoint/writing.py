"""Writes a state from all ranks into one directory: complete, or not there.

    1  every rank says what it holds; all compute who writes what         (plan)
    2  sizes against the free space, and space reserved                   nothing is written yet
    3  each rank writes its file, block by block, and syncs it            rank_%05d.safetensors
    4  rank 0 writes index.json, then the manifest, then renames          (store)

Where hosts have directories of their own (`hosts`), 4 is done on each, when all have done 3, and a
copy of each file goes to a neighbour host before.

An error of one rank, at any point, is raised on all of them as a CheckpointError, and what was
written is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from shardwise.checkpoint import store
from shardwise.checkpoint.dtypes import dtype_of
from shardwise.checkpoint.files import FileEntry, free_bytes, write_checked, write_pieces
from shardwise.checkpoint.hosts import Hosts
from shardwise.checkpoint.index import INDEX, Chunk, Index
from shardwise.checkpoint.placement import local_part, storage_bytes
from shardwise.checkpoint.plan import Part, Plan, make_plan, parts_of
from shardwise.checkpoint.safetensors_file import FileLayout, lay_out
from shardwise.checkpoint.state import State
from shardwise.checkpoint.wire import Move, move_files
from shardwise.errors import CheckpointError

_RESERVE_BYTES, _PER_PART_BYTES = 2**16, 256  # index, manifest and directories


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def write_state(
    state: State,
    final: Path,
    step: int,
    hosts: Hosts,
    check_room: Callable[[int], None] | None = None,
) -> Path:
    """Collective. Returns the path of the complete checkpoint, `final` on this host. `check_room`
    raises CheckpointError where there is no room for so many bytes; by default the disk decides."""
    saving: Path | None = None
    ranks = hosts.ranks
    try:
        offers = ranks.on_all(lambda: parts_of(state.tensors, state.pieces))
        plan = make_plan(offers, of_stages=state.is_stage)
        needed = _size_bytes(plan, hosts)
        check = check_room or (lambda size: _check_disk(size, final, ranks.rank))
        ranks.on_all(lambda: check(needed))
        saving = hosts.on_leaders(lambda: store.begin(final))[hosts.own]
        entries = ranks.on_all(lambda: _write_own(state, plan, saving, ranks.rank))
        files = {rank: entry for rank, entry in enumerate(entries) if entry is not None}
        move_files(_copies(files, hosts), ranks, saving)
        named = {file_name(rank): entry for rank, entry in files.items()}
        return hosts.on_leaders(lambda: _finish(state, plan, saving, step, named))[hosts.own]
    except RuntimeError as error:  # CheckpointError, or what `Ranks` makes of a rank's error
        if saving is not None and hosts.leads:
            store.discard(saving)
        if ranks.agreed_error is not error:  # a rank is lost: that is the error
            raise
        text = (
            f"the checkpoint of step {step} could not be written to {final.parent}: {error}; "
            "earlier checkpoints are untouched"
        )
        raise ranks.agreed(CheckpointError(text), ranks.reporter) from error


def _size_bytes(plan: Plan, hosts: Hosts) -> int:
    """What this rank's host will hold."""
    parts = [p for rank in hosts.kept_on(hosts.own) for p in plan.parts[rank]]
    return sum(p.size_bytes + _PER_PART_BYTES for p in parts) + _RESERVE_BYTES


def _check_disk(needed: int, final: Path, rank: int) -> None:
    """Before anything is written, on every rank."""
    existing = final.parent
    while not existing.exists():
        existing = existing.parent
    free = free_bytes(existing)
    if needed > free:
        raise CheckpointError(
            f"rank {rank}: {needed:,} bytes are needed and {free:,} are free on the "
            f"disk of {existing}; free some, or lower checkpoint.keep (the checkpoints that "
            "are to be deleted stay until the new one is complete)"
        )


def _layout(parts: tuple[Part, ...]) -> FileLayout:
    entries = [(_name_in_file(p), dtype_of(p.dtype, p.key), p.box.size) for p in parts]
    return lay_out(entries, {"format": "pt"})


def _name_in_file(part: Part) -> str:
    """The key itself for whole tensors, so that other tools find them under their names."""
    if part.box.size == part.shape:
        return part.key
    return f"{part.key}@{','.join(map(str, part.box.start))}"


def _copies(files: dict[int, FileEntry], hosts: Hosts) -> list[Move]:
    """Every file once more, on a neighbour host where there is one."""
    pairs = [(rank, hosts.neighbour_of(rank)) for rank in files]
    return [Move(file_name(r), files[r], r, other) for r, other in pairs if other is not None]


def _write_own(state: State, plan: Plan, saving: Path, rank: int) -> FileEntry | None:
    parts = plan.parts[rank]
    if not parts:
        return None
    layout, by_name = _layout(parts), {_name_in_file(p): p for p in parts}

    def pieces(name: str) -> Iterator[memoryview]:
        key = by_name[name].key
        if key in state.pieces:
            yield from map(storage_bytes, state.pieces[key]())
            return
        local, _, _ = local_part(state.tensors[key], key)
        if local.numel():  # one tensor at a time comes from the device
            yield storage_bytes(local.cpu().contiguous())

    return write_pieces(saving / file_name(rank), layout.size_bytes, layout.content(pieces))


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
