"""Copies in memory: on hosts that are folders here, lost, damaged, half written, read by others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_kit import make, optimizer_of, same, shard, snapshot, spoiled, train

from ranks import on_ranks, run_ranks
from shardwise.checkpoint import files, store
from shardwise.checkpoint.files import FileEntry, write_checked
from shardwise.checkpoint.hosts import Hosts
from shardwise.checkpoint.manager import CheckpointManager
from shardwise.checkpoint.memory import MemoryCopies
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.wire import Move, move_files
from shardwise.errors import CheckpointError


def copies_on(hosts: str, rank: int, folder: Path) -> MemoryCopies:
    """`hosts` has a digit a rank: ranks with the same one see one folder."""
    host = folder / f"host{hosts[rank]}"
    host.mkdir(exist_ok=True)
    found = MemoryCopies(host / "run", Ranks(), owner="me")
    found.claim()
    return found


def trained(world: int, seed: int = 0) -> tuple[Any, Any]:
    model = shard(make(seed), world, "full_shard")
    optimizer = optimizer_of(model)
    train(model, optimizer)
    return model, optimizer


def lose(rank: int, *folders: Path) -> None:
    dist.barrier()
    if rank == 0:
        for folder in folders:
            shutil.rmtree(folder)
    dist.barrier()


def loaded(copies: MemoryCopies, world: int) -> tuple[int, dict[str, Any], list[str]]:
    """Step, state and notes of the newest copy, read into another model."""
    checkpoint, notes = copies.latest()
    assert checkpoint is not None, notes
    model = shard(spoiled(make(1)), world, "full_shard")
    optimizer = optimizer_of(model)
    copies.bring(checkpoint, model)
    result = CheckpointManager(checkpoint.path.parent).load(checkpoint, model, optimizer)
    return result.step, snapshot(model, optimizer), notes


def flip(path: Path, at: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


@on_ranks(4)
def test_a_lost_host_loses_nothing(rank: int, world: int, tmp_path: Path) -> None:
    copies = copies_on("0123", rank, tmp_path)
    model, optimizer = trained(world)
    copies.save(3, model, optimizer, extra={"position": 7})
    train(model, optimizer)
    copies.save(5, model, optimizer, extra={"position": 9})
    expected = snapshot(model, optimizer)
    path = tmp_path / f"host{rank}/run"
    held = {p.name for p in (path / "step_00000005").glob("rank_*")}
    # Its own and one neighbour's, not the whole state; and of one step only.
    assert held == {f"rank_{r:05d}.safetensors" for r in (rank, (rank - 1) % 4)}
    assert [p.name for p in path.glob("step_*")] == ["step_00000005"]
    lose(rank, tmp_path / "host1")
    step, found, notes = loaded(copies_on("0123", rank, tmp_path), world)
    assert (step, notes) == (5, [])
    same(found, expected)
    assert not list(tmp_path.glob("host*/run/step_*/.coming*"))
    assert len(list((tmp_path / "host1/run/step_00000005").glob("rank_*"))) < 4
    copies_on("0123", rank, tmp_path).clear()
    assert not path.exists()


@on_ranks(4)
def test_two_neighbours_are_too_many_and_named(rank: int, world: int, tmp_path: Path) -> None:
    copies_on("0123", rank, tmp_path).save(3, *trained(world))
    lose(rank, tmp_path / "host1", tmp_path / "host2")
    found, [note] = copies_on("0123", rank, tmp_path).latest()
    assert found is None
    assert note.endswith("step_00000003: no host has rank_00001.safetensors whole")


def save_on(rank: int, world: int, hosts: str, folder: Path) -> dict[str, Any]:
    model, optimizer = trained(world)
    copies_on(hosts, rank, folder).save(3, model, optimizer)
    return snapshot(model, optimizer)


def load_on(rank: int, world: int, hosts: str, folder: Path) -> Any:
    return loaded(copies_on(hosts, rank, folder), world)


@pytest.mark.parametrize(
    ("writers", "lost", "readers"),
    [
        ("0000", (), "0"),  # one host: another number of ranks
        ("0011", (), "010"),  # mixed up, and uneven
        ("0011", (1,), "00"),  # what is left of two hosts
        ("0011", (0,), "1"),
        ("001", (0,), "0011"),  # a new host in the place of the lost one
        ("0122", (2,), "012"),
    ],
)
def test_other_ranks_on_other_hosts_read_it(
    tmp_path: Path, writers: str, lost: tuple[int, ...], readers: str
) -> None:
    expected = run_ranks(len(writers), save_on, writers, tmp_path)[0]
    for host in lost:
        shutil.rmtree(tmp_path / f"host{host}")
    for step, found, notes in run_ranks(len(readers), load_on, readers, tmp_path):
        assert (step, notes) == (3, [])
        same(found, expected)


@on_ranks(2)
def test_damage_is_named_and_another_host_helps(rank: int, world: int, tmp_path: Path) -> None:
    copies = copies_on("01", rank, tmp_path)
    model, optimizer = trained(world)
    copies.save(3, model, optimizer)
    name = f"run/step_00000003/rank_{0:05d}.safetensors"
    if rank == 0:
        flip(tmp_path / "host0" / name)
    dist.barrier()
    _, found, [note] = loaded(copies_on("01", rank, tmp_path), world)
    assert note.startswith(f"{tmp_path}/host0/{name}: damaged: bytes 0 to")
    same(found, snapshot(model, optimizer))
    lose(rank)
    for host in ("host0", "host1"):
        if rank == 0:
            flip(tmp_path / host / name)
    dist.barrier()
    checkpoint, notes = copies_on("01", rank, tmp_path).latest()
    assert checkpoint is None
    assert [n.partition(": ")[0] for n in notes[:2]] == [
        str(tmp_path / host / name) for host in ("host0", "host1")
    ]
    assert notes[2].endswith("no host has rank_00000.safetensors whole")


@on_ranks(2)
def test_the_ranks_of_a_host_find_damage_in_every_block(
    rank: int, world: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Each reads a part of the blocks; one of any part is enough."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 512)
    copies_on("00", rank, tmp_path).save(3, *trained(world))
    path = tmp_path / "host0/run/step_00000003/rank_00000.safetensors"
    for block in range(2):
        dist.barrier()
        if rank == 0:
            before = path.read_bytes()
            flip(path, at=512 * block)
        dist.barrier()
        found, notes = copies_on("00", rank, tmp_path).latest()
        assert found is None
        assert notes[0].startswith(f"{path}: damaged: bytes {512 * block} to {512 * block + 512}")
        dist.barrier()
        if rank == 0:
            path.write_bytes(before)
    monkeypatch.undo()


@on_ranks(1)
def test_a_manifest_that_is_damaged_is_named(rank: int, tmp_path: Path) -> None:
    copies_on("0", rank, tmp_path).save(3, *trained(1))
    flip(tmp_path / "host0/run/step_00000003/manifest.json")
    found, [note] = copies_on("0", rank, tmp_path).latest()
    assert found is None
    assert "step_00000003: damaged (manifest.json" in note


@pytest.mark.parametrize(("failing", "step"), [((1, 2), 3), ((1,), 5)])
@on_ranks(4)
def test_a_copy_that_some_hosts_did_not_commit(
    rank: int, world: int, tmp_path: Path, monkeypatch: Any, failing: tuple[int, ...], step: int
) -> None:
    """Without two neighbours it is not there, and the one before is; without one, the others have
    it."""
    copies = copies_on("0123", rank, tmp_path)
    model, optimizer = trained(world)
    copies.save(3, model, optimizer)
    states = {3: snapshot(model, optimizer)}
    train(model, optimizer)
    states[5] = snapshot(model, optimizer)

    def fail(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    if rank in failing:
        monkeypatch.setattr(store, "commit", fail)
    with pytest.raises(CheckpointError, match=r"could not be written to .*Input/output error"):
        copies.save(5, model, optimizer)
    monkeypatch.undo()
    found_step, found, notes = loaded(copies_on("0123", rank, tmp_path), world)
    assert found_step == step
    same(found, states[step])
    assert len(notes) == len(failing) - 1


@on_ranks(2)
def test_too_little_room_is_found_before_anything_is_written(
    rank: int, world: int, tmp_path: Path, monkeypatch: Any
) -> None:
    copies = copies_on("00", rank, tmp_path)
    model, optimizer = trained(world)
    copies.save(3, model, optimizer)
    path = tmp_path / "host0/run/step_00000003"
    size = store.read_checkpoint(path).size_bytes
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=size // 2, f_frsize=1))
    with pytest.raises(CheckpointError) as caught:
        copies.save(5, model, optimizer)
    for text in (f"{size // 2:,} are free in {tmp_path}/host0", "SHARDWISE_MEMORY_DIR", "shm-size"):
        assert text in str(caught.value)
    assert store.verify(store.read_checkpoint(path)) == []
    # The first copy asks for the room of the second too.
    lose(rank, path)
    room = SimpleNamespace(f_bavail=int(1.5 * size) + 2**16, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    with pytest.raises(CheckpointError, match="two stand while one is written"):
        copies.save(5, model, optimizer)
    monkeypatch.undo()
    assert [p.name for p in path.parent.iterdir()] == ["owner"]


@on_ranks(2)
def test_copies_of_another_owner_are_none(rank: int, world: int, tmp_path: Path) -> None:
    copies_on("00", rank, tmp_path).save(3, *trained(world))
    other = MemoryCopies(tmp_path / "host0/run", Ranks(), owner="somebody")
    assert other.latest() == (None, [])


@on_ranks(3)
def test_files_that_arrive_wrong_get_no_name(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / str(rank)
    folder.mkdir()
    content = bytes(range(256)) * 20_000  # more than a piece
    entry = write_checked(folder / f"of{rank}", content)
    ring = [Move(f"of{r}", entry, r, (r + 1) % 3) for r in range(3)]
    move_files(ring, Ranks(), folder)
    assert (folder / f"of{(rank - 1) % 3}").read_bytes() == content
    other = FileEntry(entry.size_bytes, entry.checksums[::-1])
    with pytest.raises(CheckpointError, match="other bytes arrived than rank 0 has"):
        move_files([Move("of0", other, 0, 2), Move("of1", entry, 1, 0)], Ranks(), folder)
    with pytest.raises(CheckpointError, match="absent: cannot be opened"):
        move_files([Move("absent", entry, 0, 2), Move("of2", entry, 2, 1)], Ranks(), folder)
    assert {p.name for p in folder.iterdir()} == {0: {"of0", "of1", "of2"}}.get(
        rank, {f"of{r}" for r in ((0, 1, 2) if rank == 1 else (1, 2))}
    )


@on_ranks(4)
def test_hosts_are_those_that_see_one_folder(rank: int, tmp_path: Path) -> None:
    copies_on("0101", rank, tmp_path)
    hosts = Hosts.by_folder(Ranks(), tmp_path / f"host{'0101'[rank]}")
    assert hosts.groups == ((0, 2), (1, 3))
    assert [hosts.neighbour_of(r) for r in range(4)] == [1, 0, 3, 2]
    assert hosts.leads == (rank < 2)
    assert Hosts.sharing_all(Ranks()).neighbour_of(rank) is None
