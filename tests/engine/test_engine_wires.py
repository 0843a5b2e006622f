"""Ranks, meshes and what their phases share: parameters of one unit under several strategies or on
several meshes, branches by rank, one rank's exception.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from engine_kit import TRANSPORTS, full, grid, line
from torch.distributed.tensor import Shard

import shardwise as sw
from ranks import on_ranks
from shardwise.comm.shared_memory import SharedMemoryTransport
from shardwise.engine.core.state import unit_of
from shardwise.errors import DivergenceError, EngineError, TransportError


class Pair(nn.Module):
    """Two parameters of one shape, of which one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(8))
        self.w2 = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.w1) * self.w2


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = Pair()

    def forward(self, x: torch.Tensor, uses_b: bool) -> torch.Tensor:
        x = self.a(x)
        return self.b(x) if uses_b else x


class Tempered(nn.Module):
    """A parameter without dims, which cannot be cut: it has an axis of its own."""

    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.t = nn.Parameter(torch.tensor(1.5) if scalar else torch.full((8,), 1.5))
        self.fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(torch.tanh(self.a(x)))
        if self.fails == "forward":
            raise ArithmeticError("on this rank")
        return y * self.t


def grid_of(shape: tuple[int, ...]) -> Any:
    return grid(*shape) if len(shape) == 2 else line(*shape)


def same_as(plain: nn.Module, model: nn.Module, what: str) -> None:
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        has: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(has, q.grad is not None)
        assert has == [p.grad is not None] * len(has), f"{what} {name}: gradients on {has}"
        torch.testing.assert_close(full(q.detach()), p.detach(), msg=f"{what} {name}")
        if p.grad is not None:
            torch.testing.assert_close(full(q.grad), p.grad, msg=f"{what} {name}.grad")


def trains_like(plain: nn.Module, model: nn.Module, rank: int, world: int, steps: int = 2) -> None:
    """SGD on both; batches differ by rank."""
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for step in range(steps):
        x = [torch.full((2, 8), 0.1 * (r + 1 + step)) for r in range(world)]
        model(x[rank]).sum().backward()
        torch.stack([plain(x[r]).sum() for r in range(world)]).mean().backward()
        same_as(plain, model, f"step {step}")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_reduction_says_which_parameters_it_is_about(
    rank: int, world: int, reshard: bool
) -> None:
    """One parameter is frozen and another of its shape trained, where only rank 0 runs the unit."""
    torch.manual_seed(0)
    plain = Branch()
    model = copy.deepcopy(plain)
    for module in (model.a, model.b, model):
        sw.fully_shard(module, transport="shared_memory", reshard_after_forward=reshard)
    for step in range(4):
        for m in (model, plain) if step == 2 else ():
            m.b.w1.requires_grad_(False)
            m.b.w2.requires_grad_(True)
        uses = [step < 2 or r == 0 for r in range(world)]
        x = [torch.ones(2, 8) * (r + 1) for r in range(world)]
        model(x[rank], uses[rank]).sum().backward()
        torch.stack([plain(x[r], uses[r]).sum() for r in range(world)]).mean().backward()
        same_as(plain, model, f"step {step}")
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_ranks_that_reduce_other_parameters_are_told_which(
    rank: int, world: int, strategy: str
) -> None:
    """Of one shape, so that no number differs."""
    model = sw.fully_shard(Branch(), transport="shared_memory", strategy=strategy)
    model.b.w1.requires_grad_(rank == 0)
    model.b.w2.requires_grad_(rank == 1)
    with pytest.raises(DivergenceError, match=r"rank 0 .*b\.w1.*rank 1 .*b\.w2|b\.w2.*b\.w1"):
        model(torch.ones(2, 8), True).sum().backward()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (2, 2), (4,)])
@on_ranks(4)
def test_a_parameter_without_dims_on_any_mesh(
    rank: int, world: int, shape: tuple[int, ...], transport: str
) -> None:
    torch.manual_seed(0)
    plain = Tempered()
    model = copy.deepcopy(plain)
    sw.fully_shard(model.a, mesh=grid_of(shape), transport=transport)
    sw.fully_shard(model, mesh=grid_of(shape), transport=transport)
    trains_like(plain, model, rank, world)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2,)])
@on_ranks(2)
def test_strategies_mixed_on_one_mesh(
    rank: int, world: int, shape: tuple[int, ...], transport: str
) -> None:
    torch.manual_seed(0)
    plain = Tempered()
    model = copy.deepcopy(plain)
    whole = "full_shard" if len(shape) == 1 else "hybrid_full_optimizer"
    for module, strategy in ((model.a, "no_shard"), (model.b, "shard_grad_op"), (model, whole)):
        sw.fully_shard(module, mesh=grid_of(shape), strategy=strategy, transport=transport)
    trains_like(plain, model, rank, world)


@on_ranks(4)
def test_one_set_of_ranks_has_one_domain(rank: int, world: int) -> None:
    """Whatever meshes it forms and whatever a mesh's dims are used for."""
    wires = set()
    for shape, strategy in (
        ((4,), "full_shard"),
        ((4,), "no_shard"),
        ((4, 1), "hybrid_shard"),
        ((2, 2), "hybrid_full_optimizer"),
    ):
        model = Tempered()
        sw.fully_shard(model, mesh=grid_of(shape), strategy=strategy, transport="shared_memory")
        unit = unit_of(model)
        assert isinstance(unit.transport, SharedMemoryTransport)
        wires.update(unit.wires)
        model(torch.ones(2, 8)).sum().backward()
    assert len(wires) == 1


def attempt(model: Any, optimizer: Any, x: torch.Tensor, *, fails: str = "") -> str:
    """One step; the name of what ended it."""
    hooks = []
    model.fails = fails
    try:
        if fails == "forward hook":
            hooks.append(model.b.register_forward_hook(_raise))
        out = model(x)
        if fails == "loss":
            raise ArithmeticError("on this rank")
        if fails == "backward":
            out.register_hook(_raise)
        out.sum().backward()
        optimizer.step()
        return ""
    except (ArithmeticError, EngineError, TransportError) as error:
        return type(error).__name__
    finally:
        model.fails = ""
        for hook in hooks:
            hook.remove()
        optimizer.zero_grad()


def _raise(*_: Any) -> None:
    raise ArithmeticError("on this rank")


@pytest.mark.parametrize("moment", ["forward", "forward hook"])
@pytest.mark.parametrize(
    ("scalar", "strategy", "shape"),
    [
        (True, "full_shard", (4,)),
        (True, "hybrid_shard", (4, 1)),
        (False, "hybrid_full_optimizer", (2, 2)),
        (True, "hybrid_full_optimizer", (2, 2)),
    ],
)
@on_ranks(4)
def test_one_ranks_exception_ends_all_phases(
    rank: int, world: int, scalar: bool, strategy: str, shape: tuple[int, ...], moment: str
) -> None:
    """All catch it, nobody has stepped, and the next steps are those of the plain model."""
    torch.manual_seed(0)
    plain = Tempered(scalar)
    model = copy.deepcopy(plain)
    sw.fully_shard(model, mesh=grid_of(shape), strategy=strategy, transport="shared_memory")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for culprits in ({1}, {0, 3}):
        fails = moment if rank in culprits else ""
        ended = attempt(model, optimizer, torch.ones(2, 8), fails=fails)
        assert ended == ("ArithmeticError" if rank in culprits else "TransportError")
    trains_like(plain, model, rank, world)


class Mixed(nn.Module):
    """Parameters on the mesh of all ranks and on meshes of pairs; each rank runs its own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for i in order:
            x = x + torch.tanh(self.layers[i](x))
        return x


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(4)
def test_slots_of_several_domains_never_lock(rank: int, world: int, strategy: str) -> None:
    """Every other unit on a mesh of pairs; each rank runs its own choice of units, more than there
    are slots, in an order of its own.
    """
    torch.manual_seed(0)
    mesh = grid(2, 2)
    plain = Mixed()
    model = copy.deepcopy(plain)
    place = {p: mesh["replicate"] for layer in model.layers[::2] for p in layer.parameters()}

    def placed(param: nn.Parameter) -> sw.ShardPlacementResult | None:
        return sw.ShardPlacementResult(Shard(0), place[param]) if param in place else None

    options = {"mesh": line(world), "strategy": strategy, "transport": "shared_memory"}
    for layer in model.layers:
        sw.fully_shard(layer, shard_placement_fn=placed, **options)
    sw.fully_shard(model, shard_placement_fn=placed, **options)
    wires = {wire for layer in model.layers for wire in unit_of(layer).wires}
    assert len(wires) == 2
    own = random.Random(rank)
    for step in range(15):
        order = own.sample(range(12), own.choice((1, 8, 12)))
        x = torch.full((2, 8), 0.1 * (rank + step))
        model(x, order).sum().backward()
        plain(x, order).sum().backward()
        for i, layer in enumerate(plain.layers):
            for p, q in zip(layer.parameters(), model.layers[i].parameters(), strict=True):
                group = None if i % 2 else mesh.get_group("replicate")
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(grad, group=group)
                grad /= dist.get_world_size(group)
                mine = torch.zeros_like(p) if q.grad is None else full(q.grad)
                torch.testing.assert_close(mine, grad, msg=f"step {step} layer {i}")
        model.zero_grad()
        plain.zero_grad()
