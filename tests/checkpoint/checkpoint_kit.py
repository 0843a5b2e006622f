"""What the checkpoint tests share: a model with all that is hard to save, and comparisons."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.checkpoint import store


class Awkward(nn.Module):
    """Uneven rows, fewer rows than ranks, a scalar, tied, frozen and unused parameters, three
    dtypes, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.narrow = nn.Linear(6, 1)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.arange(10.0).reshape(5, 2), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(7, 3))
        self.low = nn.Parameter(torch.randn(9, 6).to(torch.bfloat16))
        self.register_buffer("count", torch.arange(4))
        self.register_buffer("not_saved", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        h = h + (h @ self.low.float().T) @ self.low.float()
        return self.head(h).sum() * self.gain + self.narrow(h).sum()


def make(seed: int = 0) -> Awkward:
    torch.manual_seed(seed)
    return Awkward()


def shard(model: Any, world: int, strategy: str) -> Any:
    if strategy.startswith("hybrid"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    options: dict[str, Any] = {"mesh": mesh, "strategy": strategy, "transport": "c10d"}
    for layer in model.layers:
        sw.fully_shard(layer, **options)
    return sw.fully_shard(model, **options)


def optimizer_of(model: nn.Module, lr: float = 0.01, kind: str = "adamw") -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    return torch.optim.AdamW(groups, lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for i in range(steps):
        model(torch.arange(12).reshape(3, 4) + i % 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """All weights and slots, whole, and the options of each parameter's group."""
    found: dict[str, Any] = {f"model.{n}": whole(t) for n, t in model.state_dict().items()}
    if optimizer is None:
        return found
    names = {id(p): n for n, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names[id(p)]
            found[f"options.{name}"] = {k: v for k, v in group.items() if k != "params"}
            for slot, value in optimizer.state.get(p, {}).items():
                value = whole(value) if isinstance(value, torch.Tensor) else value
                found[f"optim.{name}.{slot}"] = value
    return found


def same(found: dict[str, Any], expected: dict[str, Any], note: str = "") -> None:
    assert found.keys() == expected.keys(), f"{note}: {found.keys() ^ expected.keys()}"
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, f"{note}: {key}"
            assert torch.equal(found[key], value), f"{note}: {key}"
        else:
            assert found[key] == value, f"{note}: {key}: {found[key]} {value}"


def spoiled(model: nn.Module) -> nn.Module:
    """Other numbers everywhere, through the front door."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(7)
    return model


def newest(directory: Path) -> store.Checkpoint:
    return store.list_checkpoints(directory).complete[0]


def plain_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def one_of_each_kind(folder: Path, model: nn.Module, extra: dict[str, Any] | None = None) -> Path:
    """A model after its first backward, in a folder for each kind of file that can be imported."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    names = {i: n for i, (n, _) in enumerate(model.named_parameters())}
    moments = {names[i]: slots for i, slots in optimizer.state_dict()["state"].items()}
    groups = [{"params": list(moments), "lr": 0.1}]
    whole = {"model": model.state_dict(), "optimizer": {"state": moments, "param_groups": groups}}
    for name in ("zip", "legacy", "bins", "dcp", "ours"):
        (folder / name).mkdir()
    torch.save(whole, folder / "zip" / "x.pt")
    torch.save(whole, folder / "legacy" / "x.pt", _use_new_zipfile_serialization=False)
    torch.save(model.state_dict(), folder / "bins" / "pytorch_model.bin")
    sw.save_pretrained(model, folder / "safetensors", max_shard_bytes=40)
    dcp.save({**whole, "step": 3}, checkpoint_id=folder / "dcp", no_dist=True)
    sw.CheckpointManager(folder / "ours").save(1, model, optimizer, extra=extra)
    shutil.copytree(Path(__file__).parent / "deepspeed_zero3", folder / "deepspeed")
    return folder
