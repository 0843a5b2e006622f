"""Recomputation, compile and DDP are switched between a save and a load; what is saved fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from ranks import on_ranks
from shardwise.checkpoint.import_torch import TensorSource
from shardwise.checkpoint.importing import import_checkpoint, open_source
from shardwise.checkpoint.names import canonical, submodule
from shardwise.checkpoint.source import read_whole
from shardwise.checkpoint.store import read_checkpoint
from shardwise.errors import CheckpointError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 6)  # a name that DDP has too
        self.b = nn.Linear(6, 6)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.module(x)))

    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


Wrap = Callable[[nn.Module], Any]
ORDERS: dict[str, Wrap] = {
    "plain": lambda m: m,
    "compiled": compiled,
    "recomputed": checkpoint_wrapper,
    "recomputed, compiled": lambda m: compiled(checkpoint_wrapper(m)),
    "compiled, recomputed": lambda m: checkpoint_wrapper(compiled(m)),
    "twice": lambda m: checkpoint_wrapper(compiled(checkpoint_wrapper(m))),
}


def build(wrap: Wrap, seed: int = 0, *, root: Wrap = ORDERS["plain"]) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Net()
    for i, layer in enumerate(model.layers):
        model.layers[i] = wrap(layer)
        sw.fully_shard(model.layers[i])
    model = root(model)
    sw.fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any) -> None:
    """Steps without forwards: compiling takes time."""
    for step in range(2):
        for number, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 1.0 + step + number)
        optimizer.step()
        optimizer.zero_grad()


def values(model: Any, optimizer: Any) -> list[Any]:
    """Weights and moments in the order of the parameters."""
    found = []
    for p in model.parameters():
        found += [p.full_tensor(), *(_whole(v) for _, v in sorted(optimizer.state[p].items()))]
    return found


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_equal(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right) > 0
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@on_ranks(2, timeout_s=120)
def test_wrappers_may_be_switched_between_runs(rank: int, tmp_path: Path) -> None:
    for number, (name, wrap) in enumerate(ORDERS.items()):
        manager = sw.CheckpointManager(tmp_path / str(number))
        model, optimizer = build(wrap, root=compiled if number % 2 else ORDERS["plain"])
        train(model, optimizer)
        for module in model.modules():
            if isinstance(module, Block):
                module.steps = 7
        manager.save(2, model, optimizer)
        found, _ = manager.latest()
        assert found is not None
        names = open_source(found.path).tensors
        assert not [n for n in names if "_orig_mod" in n or "_checkpoint_wrapped" in n]
        for other in ORDERS.values() if name in ("plain", "twice") else (ORDERS["plain"],):
            to, to_optimizer = build(other, seed=1)
            manager.load(found, to, to_optimizer)
            assert_equal(values(to, to_optimizer), values(model, optimizer))
            assert {m.steps for m in to.modules() if isinstance(m, Block)} == {7}


def saved_as_before(path: Path, new: Path, rename: dict[str, str]) -> Any:
    """A checkpoint under the names that the version before gave it."""
    source = open_source(path)
    tensors = {}
    for key in source.tensors:
        start, _, rest = key.partition(".")
        name = rest.rpartition(".")[0] if start == "optim" else rest
        tensors[key.replace(name, rename.get(f"{start} {name}", name))] = read_whole(source, key)
    objects = {
        ("model." + rename.get(f"model {k[6:]}", k[6:]) if k.startswith("model.") else k): v
        for k, v in source.objects.items()
    }
    groups = source.objects["optim.groups"]
    objects["optim.groups"] = [
        {**g, "params": [rename.get(f"optim {n}", n) for n in g["params"]]} for g in groups
    ]
    return read_checkpoint(import_checkpoint(TensorSource(path, tensors, objects), new))


@on_ranks(1)
def test_old_checkpoints_still_load(rank: int, tmp_path: Path) -> None:
    """Weights under the names of `state_dict()`, optimizer state under `named_parameters()`'s."""
    manager = sw.CheckpointManager(tmp_path)
    for number, (name, wrap) in enumerate([*ORDERS.items(), ("ddp", DistributedDataParallel)]):
        if name == "ddp":
            torch.manual_seed(0)
            model: Any = DistributedDataParallel(Net())
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        else:
            model, optimizer = build(wrap)
        train(model, optimizer)
        path = manager.save(number + 1, model, optimizer)
        rename = {f"model {canonical(model, n)}": n for n in model.state_dict()}
        rename |= {f"optim {canonical(model, n)}": n for n, _ in model.named_parameters()}
        old = saved_as_before(path, tmp_path / "old" / f"step_{number:08d}", rename)
        same = build(wrap, seed=1) if name != "ddp" else (None, None)
        for to, to_optimizer in (same, build(ORDERS["plain"], seed=1)):
            if to is not None:
                manager.load(old, to, to_optimizer)
                expected = values(to, to_optimizer)
                for found, wanted in zip(model.parameters(), to.parameters(), strict=True):
                    assert torch.equal(_whole(found), _whole(wanted))
                assert len(expected) == 4 * len(list(model.parameters()))


@on_ranks(1)
def test_names(rank: int) -> None:
    model = DistributedDataParallel(nn.Sequential(compiled(checkpoint_wrapper(Block()))))
    names = {canonical(model, n) for n, _ in model.named_parameters()}
    assert names == {"0.module.weight", "0.module.bias", "0.b.weight", "0.b.bias"}
    assert {canonical(model, n) for n in model.state_dict()} == names | {"0._extra_state"}
    assert isinstance(submodule(model, "0"), Block)
    assert isinstance(submodule(model, "0.module"), nn.Linear)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    tensors = {"model._orig_mod.weight": torch.ones(2, 2), "model.weight": torch.zeros(2, 2)}
    tensors |= {"model.bias": torch.ones(2)}
    import_checkpoint(TensorSource(tmp_path, tensors, {}), tmp_path / "step_00000001")
    with pytest.raises(CheckpointError, match="are both called"):
        sw.load_pretrained(nn.Linear(2, 2), tmp_path / "step_00000001")
