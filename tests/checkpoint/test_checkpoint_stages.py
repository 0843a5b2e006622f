"""Checkpoints of pipelines: each rank saves and loads its stage of the model; any other cut reads
them, and so does a model that is not cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from ranks import on_ranks, run_ranks
from shardwise.errors import CheckpointError

LAYERS, WIDTH = 4, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.ones(3))


class Part(nn.Module):
    """Layers `first` to `last` of the model, under their names in the whole."""

    def __init__(self, first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {str(i): Layer() for i in range(LAYERS)}
        self.layers = nn.ModuleDict({str(i): layers[str(i)] for i in range(first, last)})


def build(world: int, stages: int, scale: float) -> tuple[Part, torch.optim.Optimizer]:
    """This rank's stage, sharded over the ranks of the stage, behind two steps."""
    mesh = init_device_mesh("cpu", (stages, world // stages), mesh_dim_names=("stage", "shard"))
    size, stage = LAYERS // stages, mesh.get_local_rank(0)
    part = Part(stage * size, (stage + 1) * size)
    for unit in (*part.layers.values(), part):
        sw.fully_shard(unit, mesh=mesh["shard"])
    decays = [p for n, p in part.named_parameters() if "up" in n]
    rest = [p for n, p in part.named_parameters() if "up" not in n]
    optimizer = torch.optim.AdamW(
        [{"params": decays, "lr": scale}, {"params": rest, "weight_decay": 0.0, "lr": 2 * scale}]
    )
    for step in range(2):
        for param in part.parameters():
            param.grad = torch.full_like(param, scale * (step + 1))
        optimizer.step()
    return part, optimizer


def everything(part: Part, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By the name of a parameter: it, its state, the options of its group."""
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = next(n for n, p in part.named_parameters() if p is param)
            slots = {k: whole(v) for k, v in optimizer.state[param].items()}
            found[name] = (whole(param), slots, group["lr"], group["weight_decay"])
    return found


def whole(value: Any) -> torch.Tensor:
    value = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
    return value.detach().clone()


def save(rank: int, world: int, stages: int, folder: Path) -> dict[str, Any]:
    part, optimizer = build(world, stages, 0.1)
    manager = sw.CheckpointManager(folder, stages=stages > 1)
    manager.rehearse(1, part, optimizer)
    manager.save(2, part, optimizer)
    return everything(part, optimizer)


def load(rank: int, world: int, stages: int, folder: Path) -> dict[str, Any]:
    part, optimizer = build(world, stages, 0.7)
    manager = sw.CheckpointManager(folder, stages=stages > 1)
    checkpoint, _ = manager.latest()
    assert checkpoint is not None
    manager.load(checkpoint, part, optimizer)
    return everything(part, optimizer)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, (weight, slots, *options) in found.items():
        wanted, state, *theirs = expected[name]
        assert torch.equal(weight, wanted) and options == theirs, name
        assert slots.keys() == state.keys()
        assert all(torch.equal(slots[k], state[k]) for k in slots), name


@pytest.mark.parametrize("writers", [(4, 2), (2, 2), (4, 4), (2, 1)], ids=str)
def test_any_cut_reads_any_other(writers: tuple[int, int], tmp_path: Path) -> None:
    """(ranks, stages); two groups of parameters, with options of their own."""
    expected: dict[str, Any] = {}
    for own in run_ranks(writers[0], save, writers[1], tmp_path):
        expected |= own
    assert len(expected) == 4 * LAYERS
    for ranks, stages in ((1, 1), (2, 1), (2, 2), (4, 2)):
        covered: set[str] = set()
        for own in run_ranks(ranks, load, stages, tmp_path):
            same(own, expected)
            covered |= own.keys()
        assert covered == expected.keys()


@on_ranks(2)
def test_stages_that_are_not_called_so(rank: int, world: int, tmp_path: Path) -> None:
    """What rank 0 has for all would be its own stage's."""
    part, optimizer = build(world, 2, 0.1)
    manager = sw.CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=r"other names \(model.layers.0.*stages=True"):
        manager.save(2, part, optimizer)
    assert manager.latest()[0] is None


@on_ranks(2)
def test_what_no_stage_has_is_refused(rank: int, world: int, tmp_path: Path) -> None:
    """And what a stage has and the checkpoint lacks."""
    part, optimizer = build(world, 2, 0.1)
    manager = sw.CheckpointManager(tmp_path, stages=True)
    manager.save(2, part, optimizer)
    checkpoint, _ = manager.latest()
    assert checkpoint is not None
    other = Part(2 * rank, 2 * rank + 1)  # layers 0 and 2
    with pytest.raises(CheckpointError, match=r"unknown to the model: layers\.[13]\."):
        manager.load(checkpoint, other)
    other.layers["9"] = Layer()
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: layers\.9\."):
        manager.load(checkpoint, other)
