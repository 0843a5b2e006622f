"""State of `OwnedOptimizer`: in checkpoints and state dicts, on other ranks and in other layouts;
and in runs that are reproducible on any number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from test_owned import OTHERS, Net, set_gradients, sharded
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from ranks import on_ranks, run_ranks

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon": (torch.optim.Muon, {"lr": 0.05}),
    "Adafactor": OTHERS["Adafactor"],
    "AdamW": OTHERS["AdamW"],
}
LAYOUTS = {2: "rows", 3: "whole", 4: "hybrid", 1: "rows"}


def optimizer_of(net: Net, kind: str) -> sw.OwnedOptimizer:
    build, defaults = KINDS[kind]
    params = [*net.matrices(), net.experts] if kind == "Muon" else list(net.parameters())
    return sw.OwnedOptimizer(params, build, **defaults)


def step(net: Net, optimizer: Any, number: int) -> None:
    set_gradients([p for g in optimizer.param_groups for p in g["params"]], number)
    optimizer.step()


def wholes(net: Net, optimizer: Any) -> list[torch.Tensor]:
    """Weights and state, whole, on every rank."""
    values = list(net.parameters())
    for group in optimizer.param_groups:
        for param in group["params"]:
            values += [torch.as_tensor(v) for _, v in sorted(optimizer.state[param].items())]
    return [(v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for v in values]


def save(rank: int, world: int, directory: Path, kind: str) -> list[torch.Tensor]:
    """Two steps, a checkpoint, another step; what that made."""
    net = sharded(world, LAYOUTS[world])
    optimizer = optimizer_of(net, kind)
    for number in range(2):
        step(net, optimizer, number)
    sw.CheckpointManager(directory).save(2, net, optimizer)
    step(net, optimizer, 2)
    return wholes(net, optimizer)


def load(rank: int, world: int, directory: Path, kind: str, layout: str) -> list[torch.Tensor]:
    """The third step behind the checkpoint."""
    net = sharded(world, layout)
    optimizer = optimizer_of(net, kind)
    step(net, optimizer, 7)  # whatever was there goes
    manager = sw.CheckpointManager(directory)
    checkpoint, skipped = manager.latest()
    assert checkpoint is not None and not skipped
    manager.load(checkpoint, net, optimizer)
    step(net, optimizer, 2)
    return wholes(net, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_goes_to_other_ranks_and_layouts(kind: str, tmp_path: Path) -> None:
    """The next step is that of the run that went on, to the last bit."""
    for world in (4, 3):
        directory = tmp_path / str(world)
        expected = run_ranks(world, save, directory, kind)[0]
        for readers, layout in ((2, "rows"), (4, "columns"), (1, "rows"), (3, "replicas")):
            found = run_ranks(readers, load, directory, kind, layout)[0]
            assert len(found) == len(expected)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs), (kind, world, readers)


def load_element_wise(rank: int, world: int, directory: Path) -> list[torch.Tensor]:
    net = sharded(world, "rows")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    manager = sw.CheckpointManager(directory)
    checkpoint, skipped = manager.latest()
    assert checkpoint is not None and not skipped
    manager.load(checkpoint, net, optimizer)
    step(net, optimizer, 2)
    return wholes(net, optimizer)


def test_owned_state_becomes_even_cuts(tmp_path: Path) -> None:
    """An optimizer whose state lies like its parameters goes on from it."""
    expected = run_ranks(4, save, tmp_path, "AdamW")[0]
    for ours, theirs in zip(run_ranks(2, load_element_wise, tmp_path)[0], expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_state_dicts(kind: str, rank: int, world: int) -> None:
    """Torch's own, and those by name."""
    net, other, third = (sharded(world, layout) for layout in ("rows", "columns", "rows"))
    first, second, last = (optimizer_of(n, kind) for n in (net, other, third))
    for number in range(2):
        step(net, first, number)
    with torch.no_grad():
        for target in (other, third):
            for mine, theirs in zip(target.parameters(), net.parameters(), strict=True):
                mine.copy_(theirs.full_tensor())
    second.load_state_dict(first.state_dict())
    # By name, each rank its part; whole ones are made of it, though torch places none of them.
    dsd.set_optimizer_state_dict(third, last, dsd.get_optimizer_state_dict(net, first))
    options = dsd.StateDictOptions(full_state_dict=True)
    named = dsd.get_optimizer_state_dict(net, first, options=options)["state"]
    for (name, param), (_, mine) in zip(
        net.named_parameters(), third.named_parameters(), strict=True
    ):
        for slot, value in named.get(name, {}).items():
            for held in (first.state[param][slot], last.state[mine][slot]):
                held = held.full_tensor() if isinstance(held, DTensor) else held
                assert torch.equal(torch.as_tensor(held), torch.as_tensor(value))
    for n, o in ((net, first), (other, second), (third, last)):
        step(n, o, 2)
    for ours, theirs, more in zip(
        wholes(net, first), wholes(other, second), wholes(third, last), strict=True
    ):
        assert torch.equal(ours, theirs) and torch.equal(ours, more)


def reproducible(rank: int, world: int, strategy: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20, bias=False), nn.Tanh(), nn.Linear(20, 7, bias=False))
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2], model):
        sw.fully_shard(layer, mesh=mesh, strategy=strategy)
    optimizer = sw.OwnedOptimizer(model.parameters(), torch.optim.Muon, lr=0.05)
    with sw.reproducible(model, optimizer, num_micro_batches=4) as run:
        for number in range(3):
            for micro in run.micro_batches(number):
                generator = torch.Generator().manual_seed(10 * number + micro.index)
                model(torch.randn(2, 12, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def test_muon_on_any_number_of_ranks() -> None:
    """Weights of a reproducible run, to the last bit."""
    expected = run_ranks(1, reproducible, "full_shard")[0]
    for world, strategy in ((2, "full_shard"), (4, "full_shard"), (2, "no_shard")):
        for ours, theirs in zip(run_ranks(world, reproducible, strategy)[0], expected, strict=True):
            assert torch.equal(ours, theirs), (world, strategy)


class Foreign(torch.optim.Optimizer):
    """Knows nothing of DTensor: it looks at memory."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["seen"], state["mean"] = 0, torch.zeros_like(param)
                state["seen"] += 1
                state["mean"].numpy()[:] = 0.9 * state["mean"].numpy() + param.grad.numpy()
                param.numpy()[:] -= group["lr"] * state["mean"].numpy()


@on_ranks(2, 3)
def test_local_view(rank: int, world: int) -> None:
    """An optimizer of numpy arrays on sharded parameters: weights and state of one process."""
    net, plain = sharded(world, "rows"), Net()
    optimizer = sw.local_view(Foreign(net.parameters()))
    other = Foreign(plain.parameters())
    for number in range(3):
        step(net, optimizer, number)
        step(plain, other, number)
        if number == 1:
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.05
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)
        assert torch.equal(optimizer.state[ours]["mean"].full_tensor(), other.state[theirs]["mean"])
    with pytest.raises(ValueError, match="otherwise than its parts"):
        sw.local_view(Normalised(net.parameters()))


class Normalised(Foreign):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            param.sub_(param.grad / param.grad.norm())
