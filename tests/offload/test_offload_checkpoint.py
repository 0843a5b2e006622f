"""Checkpoints of offloaded optimizers: as of those in memory, written and read by pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
from torch.distributed.checkpoint import state_dict as dsd

import shardwise as sw
from checkpoint.checkpoint_kit import make, optimizer_of, same, shard, snapshot, spoiled, train
from ranks import on_ranks, run_ranks
from shardwise.checkpoint.state import State
from shardwise.errors import CheckpointError
from shardwise.offload import OffloadedOptimizer

SAVERS = [(2, "full_shard", None), (2, "full_shard", "nvme"), (3, "shard_grad_op", "cpu")]
LOADERS = [(1, "no_shard", None), (2, "full_shard", "cpu"), (3, "shard_grad_op", "nvme")]


def wrapped(model: Any, folder: Path, place: str | None, lr: float = 0.02) -> Any:
    optimizer = optimizer_of(model, lr)
    if place is None:
        return optimizer
    directory = folder / f"offload_{place}" if place == "nvme" else None
    return OffloadedOptimizer(optimizer, state=place, directory=directory, chunk_bytes=2**16)  # type: ignore[arg-type]


def save(rank: int, world: int, folder: Path, strategy: str, place: str | None) -> dict[str, Any]:
    model = shard(make(), world, strategy)
    optimizer = wrapped(model, folder, place)
    train(model, optimizer)
    sw.CheckpointManager(folder / f"{world}-{strategy}-{place}").save(2, model, optimizer)
    expected = snapshot(model, optimizer)
    if place is not None:
        optimizer.close()
    return expected


def load(
    rank: int, world: int, strategy: str, place: str | None, folder: Path, saved: dict[str, Any]
) -> None:
    for name, expected in saved.items():
        model = spoiled(shard(make(1), world, strategy))
        optimizer = wrapped(model, folder, place, lr=0.5)
        train(model, optimizer, 1)
        manager = sw.CheckpointManager(folder / name)
        checkpoint, _ = manager.latest()
        assert checkpoint is not None
        manager.load(checkpoint, model, optimizer)
        same(snapshot(model, optimizer), expected, f"{name} on {world} {strategy} {place}")
        train(model, optimizer, 1)
        if place is not None:
            optimizer.close()


def test_any_place_on_any_world_reads_any_other(tmp_path: Path) -> None:
    saved = {
        f"{world}-{strategy}-{place}": run_ranks(world, save, tmp_path, strategy, place)[0]
        for world, strategy, place in SAVERS
    }
    same(saved["2-full_shard-None"], saved["2-full_shard-nvme"], "written from both")
    for world, strategy, place in LOADERS:
        run_ranks(world, load, strategy, place, tmp_path, saved)


@on_ranks(2)
def test_torchs_state_dicts(rank: int, world: int, tmp_path: Path) -> None:
    """Those that torch.distributed.checkpoint takes, by names of parameters."""
    made: list[tuple[Any, Any]] = []
    for place in ("nvme", None):
        torch.manual_seed(0)
        model = sw.fully_shard(torch.nn.Linear(9, 5))
        optimizer = wrapped(model, tmp_path, place)
        model(torch.ones(2, 9)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        made.append((model, optimizer))
    (model, optimizer), (plain, other) = made
    found = sw.get_optimizer_state_dict(model, optimizer)
    same_state(found, sw.get_optimizer_state_dict(plain, other))
    optimizer.close()
    again = wrapped(plain, tmp_path, "nvme")
    dsd.set_optimizer_state_dict(plain, again, found)
    same_state(sw.get_optimizer_state_dict(plain, again), found)
    again.close()


def same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["state"].keys() == b["state"].keys()
    for name, slots in a["state"].items():
        for slot, value in slots.items():
            other = b["state"][name][slot]
            if hasattr(value, "full_tensor"):
                value, other = value.full_tensor(), other.full_tensor()
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), (name, slot)


def test_pieces_are_no_larger_than_a_chunk(tmp_path: Path) -> None:
    model = torch.nn.Linear(500, 300)
    optimizer = wrapped_large(model, tmp_path)
    state = State()
    state.add_optimizers(model, optimizer)
    sizes = [p.numel() * p.itemsize for key in state.pieces for p in state.pieces[key]()]
    assert len(sizes) > 10 and max(sizes) <= 2**16 // 2
    assert sum(sizes) == 2 * 4 * (500 * 300 + 300)
    optimizer.close()


def wrapped_large(model: Any, folder: Path) -> OffloadedOptimizer:
    optimizer = OffloadedOptimizer(
        optim.AdamW(model.parameters()), state="nvme", directory=folder / "o", chunk_bytes=2**16
    )
    model(torch.ones(2, 500)).sum().backward()
    optimizer.step()
    return optimizer


@on_ranks(2)
def test_masters_and_what_does_not_fit(rank: int, world: int, tmp_path: Path) -> None:
    def made(halves: bool, **how: Any) -> tuple[Any, OffloadedOptimizer]:
        torch.manual_seed(0)
        linear = torch.nn.Linear(8, 6)
        model = sw.fully_shard(linear.bfloat16() if halves else linear)
        inner = optim.SGD(model.parameters(), lr=0.1, momentum=how.pop("momentum", 0.9))
        return model, OffloadedOptimizer(inner, state="cpu", **how)

    model, optimizer = made(True, master_weights=True)
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    optimizer.step()
    manager = sw.CheckpointManager(tmp_path)
    manager.save(1, model, optimizer)
    checkpoint, _ = manager.latest()
    assert checkpoint is not None
    other, again = made(True, master_weights=True)
    manager.load(checkpoint, other, again)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[p].items():
            found = again.state[q][name]
            assert found.dtype == value.dtype and torch.equal(found.to_local(), value.to_local())
    other, without = made(True)
    with pytest.raises(CheckpointError, match="'master_weight', which this optimizer does not"):
        manager.load(checkpoint, other, without)
    other, plain = made(True, master_weights=True, momentum=0.0)
    with pytest.raises(CheckpointError, match="'momentum_buffer', which this optimizer does"):
        manager.load(checkpoint, other, plain)


@on_ranks(2)
def test_background(rank: int, world: int, tmp_path: Path) -> None:
    """From a copy of host memory; files would have to be copied into it."""
    for place in ("cpu", "nvme"):
        model = shard(make(), world, "full_shard")
        optimizer = wrapped(model, tmp_path, place)
        train(model, optimizer)
        expected = snapshot(model, optimizer)
        manager = sw.CheckpointManager(tmp_path / place, background=True)
        if place == "nvme":
            with pytest.raises(CheckpointError, match="reads it piece by piece"):
                manager.save(1, model, optimizer)
        else:
            manager.save(1, model, optimizer)
            train(model, optimizer)
            manager.close()
            checkpoint, _ = manager.latest()
            assert checkpoint is not None
            manager.load(checkpoint, model, optimizer)
            same(snapshot(model, optimizer), expected, place)
        optimizer.close()
