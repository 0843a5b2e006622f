"""One test body for two engines: torch's FSDP2, the oracle, and shardwise on each transport.

A body takes `engine`, the name of one of `ENGINES`, and asks `fs(engine)` for the module to call.
What holds for torch must hold here; where shardwise is meant to be better, the test takes `OURS`
only and says so.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise

OURS = ("auto", "c10d")
ENGINES = ("torch", *OURS)
engines = pytest.mark.parametrize("engine", ENGINES)


@functools.cache
def fs(engine: str) -> Any:
    """The names of FSDP2 as that engine has them."""
    if engine == "torch":
        import torch.distributed.fsdp as theirs

        return theirs
    names = {n: getattr(shardwise, n) for n in shardwise.__all__}
    names["fully_shard"] = functools.partial(shardwise.fully_shard, transport=engine)
    return types.SimpleNamespace(**names)


# -- models --------------------------------------------------------------------------------------
class TwoLayer(nn.Module):
    """`up` to `factor` times the width and `down` again; an optional buffer is added."""

    def __init__(self, dim: int = 8, factor: int = 4, buffer: bool = False, bias: bool = True):
        super().__init__()
        self.up = nn.Linear(dim, factor * dim, bias=bias)
        self.down = nn.Linear(factor * dim, dim, bias=bias)
        self.register_buffer("shift", torch.ones(dim) if buffer else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.down(F.gelu(self.up(x))))
        return y if self.shift is None else y + self.shift

    def reset_parameters(self) -> None:
        if self.shift is not None:
            self.shift.fill_(1.0)


class Scaled(nn.Sequential):
    """Blocks, and a gain of the root's own."""

    def __init__(self, *blocks: nn.Module, dim: int = 8) -> None:
        super().__init__(*blocks)
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def tower(n: int = 3, dim: int = 8, gain: bool = False, **options: Any) -> nn.Sequential:
    """`n` blocks, with the same weights on all ranks; `gain` gives the root a parameter."""
    torch.manual_seed(n * 100 + dim)
    blocks = [TwoLayer(dim, 3 + i % 2, **options) for i in range(n)]
    return Scaled(*blocks, dim=dim) if gain else nn.Sequential(*blocks)


def shard_tower(engine: str, model: nn.Module, **options: Any) -> Any:
    """A unit per block, and the root."""
    for block in model.children():
        fs(engine).fully_shard(block, **options)
    return fs(engine).fully_shard(model, **options)


def inputs(rank: int, step: int = 0, rows: int = 4, dim: int = 8) -> torch.Tensor:
    """Other numbers on each rank and at each step."""
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(97 * step + rank))


# -- the reference -------------------------------------------------------------------------------
def mean_gradients(model: nn.Module, group: Any = None) -> None:
    """Average an unsharded replica's gradients over the ranks; none on any rank stays None."""
    for p in model.parameters():
        have = torch.tensor(0.0 if p.grad is None else 1.0)
        dist.all_reduce(have, group=group)
        if have.item():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)


def same_parts(sharded: nn.Module, replica: nn.Module, *, rtol: float = 1e-5) -> None:
    """Every parameter, and its gradient, is this rank's part of the replica's."""
    names = [n for n, _ in replica.named_parameters()]
    assert [n for n, _ in sharded.named_parameters()] == names
    for (name, p), q in zip(sharded.named_parameters(), replica.parameters(), strict=True):
        assert isinstance(p, DTensor), name
        close(p.to_local(), part_of(q, p), name, rtol)
        assert (p.grad is None) == (q.grad is None), f"gradient of {name}: {p.grad} {q.grad}"
        if p.grad is not None:
            assert isinstance(p.grad, DTensor), name
            assert p.grad.placements == p.placements
            close(p.grad.to_local(), part_of(q.grad, p), f"gradient of {name}", rtol)


def part_of(whole: torch.Tensor, like: Any) -> torch.Tensor:
    whole = whole.detach()
    return distribute_tensor(whole, like.device_mesh, like.placements).to_local()


def close(got: torch.Tensor, want: torch.Tensor, what: str, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol / 10, msg=lambda m: f"{what}: {m}")


def train(
    sharded: nn.Module,
    replica: nn.Module,
    rank: int,
    *,
    steps: int = 4,
    make_inputs: Callable[[int, int], Any] = inputs,
    make_optimizer: Any = None,
    rtol: float = 1e-5,
    group: Any = None,
) -> None:
    """Both train on this rank's data; losses, gradients and weights stay the same."""
    make_optimizer = make_optimizer or functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-4)
    opts = [make_optimizer(m.parameters()) for m in (sharded, replica)]
    for step in range(steps):
        losses = [loss_of(m(make_inputs(rank, step))) for m in (sharded, replica)]
        close(losses[0].detach(), losses[1].detach(), f"loss of step {step}", rtol)
        for loss in losses:
            loss.backward()
        mean_gradients(replica, group)
        same_parts(sharded, replica, rtol=rtol)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=step % 2 == 0)


def loss_of(out: Any) -> torch.Tensor:
    """One number of whatever a model returns."""
    if isinstance(out, torch.Tensor):
        return out.float().square().sum()
    values = out.values() if isinstance(out, dict) else out
    return torch.stack([loss_of(v) for v in values]).sum()


def both(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model and an unsharded replica of it."""
    return model, copy.deepcopy(model)


def mesh_of(*sizes: int) -> DeviceMesh:
    from engine_kit import grid, line

    return line(*sizes) if len(sizes) == 1 else grid(*sizes)


def shows_shards(module: nn.Module) -> bool:
    """True when the module's own parameters are sharded ones, False when they are whole."""
    kinds = {isinstance(p, DTensor) for p in module.parameters()}
    assert len(kinds) == 1, "a mix of sharded and whole parameters"
    return kinds.pop()
