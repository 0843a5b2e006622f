"""`OwnedOptimizer`: numbers of the wrapped optimizer on whole tensors, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw
from ranks import on_ranks
from shardwise.comm.exchange import gather_objects
from shardwise.engine.mesh.own_rows import share_out, work_of
from shardwise.errors import EngineError

STEPS = 3


class Net(nn.Module):
    """Matrices, wide and high, of rows that no number of ranks divides; a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"a": (13, 8), "b": (8, 13), "c": (24, 24), "d": (5, 32)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.experts = nn.Parameter(torch.randn(5, 6, 9, generator=generator))
        self.bias = nn.Parameter(torch.randn(7, generator=generator))

    def matrices(self) -> list[Any]:
        return [self.a, self.b, self.c, self.d]


def gradient(shape: torch.Size, number: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(shape, generator=generator)


def set_gradients(params: list[Any], step: int) -> None:
    """Each rank's part of the same whole gradients."""
    for number, param in enumerate(params):
        whole = gradient(param.shape, number, step)
        if isinstance(param, DTensor):
            part = param.detach().clone()
            part.copy_(whole)
            param.grad = part
        else:
            param.grad = whole


def plain_run(
    build: Callable[..., torch.optim.Optimizer], pick: Callable[[Net], list[Any]], **defaults: Any
) -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    params = pick(net)
    optimizer = build(params, **defaults)
    for step in range(STEPS):
        set_gradients(params, step)
        optimizer.step()
    return net, optimizer


def sharded(world: int, layout: str) -> Net:
    net = Net()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    options: dict[str, Any] = {}
    if layout == "columns":
        options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1)
    elif layout == "whole":
        options["shard_placement_fn"] = sw.whole_matrices(net, world)
    elif layout == "blocks":
        options["shard_placement_fn"] = sw.whole_blocks(64)
    elif layout == "replicas":
        options["strategy"] = "no_shard"
    elif layout == "hybrid" and world % 2 == 0:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        options["strategy"] = "hybrid_shard"
    return sw.fully_shard(net, mesh=mesh, **options)


LAYOUTS = ["rows", "columns", "whole", "blocks", "replicas", "hybrid"]


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(1, 2, 3, 4)
def test_muon_is_that_of_one_process(layout: str, rank: int, world: int) -> None:
    """To the last bit, momentum too; every matrix is orthogonalised once in a step, on all ranks
    together."""
    calls = counted_iterations()
    expected, plain = plain_run(torch.optim.Muon, Net.matrices, lr=0.05, weight_decay=0.1)
    calls.clear()
    net = sharded(world, layout)
    optimizer = sw.OwnedOptimizer(net.matrices(), torch.optim.Muon, lr=0.05, weight_decay=0.1)
    for step in range(STEPS):
        set_gradients(net.matrices(), step)
        optimizer.step()
    total = sum(gather_objects(len(calls), None, "calls"))
    assert total == STEPS * 4, (total, optimizer.owners())
    for ours, theirs in zip(net.matrices(), expected.matrices(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), layout
        buffer = optimizer.state[ours]["momentum_buffer"]
        assert torch.equal(buffer.full_tensor(), plain.state[theirs]["momentum_buffer"])


def counted_iterations() -> list[Any]:
    """Each orthogonalisation on this rank, from here on."""
    import torch.optim._muon as muon

    original = getattr(muon, "_counted", muon._zeropower_via_newtonschulz)
    calls: list[Any] = []

    def counting(grad: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(tuple(grad.shape))
        return original(grad, *rest)

    muon._counted = original  # type: ignore[attr-defined]
    muon._zeropower_via_newtonschulz = counting
    return calls


@pytest.mark.parametrize("layout", ["rows", "columns", "replicas", "hybrid"])
@on_ranks(1, 2, 4)
def test_a_stack_is_stepped_as_matrices(layout: str, rank: int, world: int) -> None:
    net, params = sharded(world, layout), list(Net().experts.detach().clone())
    params = [p.requires_grad_() for p in params]
    plain = torch.optim.Muon(params, lr=0.05)
    optimizer = sw.OwnedOptimizer([net.experts], torch.optim.Muon, lr=0.05)
    for step in range(STEPS):
        set_gradients([net.experts], step)
        for param, grad in zip(params, gradient(net.experts.shape, 0, step), strict=True):
            param.grad = grad
        optimizer.step()
        plain.step()
    assert torch.equal(net.experts.full_tensor(), torch.stack(params).detach())
    buffers = torch.stack([plain.state[p]["momentum_buffer"] for p in params])
    assert torch.equal(optimizer.state[net.experts]["momentum_buffer"].full_tensor(), buffers)


OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.05}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
}


@pytest.mark.parametrize("name", OTHERS)
@on_ranks(2, 3)
def test_others_are_those_of_one_process(name: str, rank: int, world: int) -> None:
    """With numbers of their own (steps), state of other shapes, and tensors of one dim."""
    build, defaults = OTHERS[name]

    def pick(net: Net) -> list[Any]:
        return list(net.parameters())

    expected, plain = plain_run(build, pick, **defaults)
    net = sharded(world, "rows")
    optimizer = sw.OwnedOptimizer(pick(net), build, **defaults)
    for step in range(STEPS):
        set_gradients(pick(net), step)
        optimizer.step()
    for ours, theirs in zip(pick(net), pick(expected), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)
        slots = optimizer.state[ours]
        assert slots.keys() == plain.state[theirs].keys()
        for key, value in plain.state[theirs].items():
            found = slots[key]
            found = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), (name, key)


@on_ranks(2)
def test_what_has_no_gradient_is_left_alone(rank: int, world: int) -> None:
    """And options follow the groups: schedulers work."""
    net, plain = sharded(world, "rows"), Net()
    optimizer = sw.OwnedOptimizer(
        [{"params": [net.a, net.b]}, {"params": [net.c, net.d], "lr": 0.01}],
        torch.optim.Muon, lr=0.05,
    )  # fmt: skip
    other = torch.optim.Muon(
        [{"params": [plain.a, plain.b]}, {"params": [plain.c, plain.d], "lr": 0.01}], lr=0.05
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, other)]
    for step in range(3):
        for model in (net, plain):
            set_gradients(model.matrices(), step)
            (model.b if step else model.c).grad = None
        for one, scheduler in zip((optimizer, other), schedulers, strict=True):
            one.step()
            one.zero_grad()
            scheduler.step()
    for ours, theirs in zip(net.matrices(), plain.matrices(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)


@on_ranks(2)
def test_the_next_forward_sees_the_step(rank: int, world: int) -> None:
    """A copy that was kept gathered is stale behind it."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    sw.fully_shard(model, mesh=init_device_mesh("cpu", (world,)), strategy="shard_grad_op")
    optimizer = sw.OwnedOptimizer(model.parameters(), torch.optim.Muon, lr=0.5)
    x = torch.ones(2, 8)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(model(x), x @ model.weight.full_tensor().t())
        optimizer.zero_grad()


@on_ranks(2)
def test_mistakes(rank: int, world: int) -> None:
    net = sharded(world, "rows")
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(ValueError, match=kind.__name__):
            sw.OwnedOptimizer(net.matrices(), kind)
    with pytest.raises(ValueError, match="2D"):
        sw.OwnedOptimizer([net.bias], torch.optim.Muon)
    with pytest.raises(ValueError, match="empty parameter list"):
        sw.OwnedOptimizer([], torch.optim.Muon)
    with pytest.raises(ValueError, match="all ranks"):
        sw.step_in_backward(net, sw.OwnedOptimizer(net.matrices(), torch.optim.Muon))


@on_ranks(4)
def test_what_is_cut_twice_is_refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    split = sw.fully_shard(nn.Linear(8, 8), mesh=mesh, strategy="hybrid_full_optimizer")
    with pytest.raises(ValueError, match=r"weight: is cut over several mesh dims"):
        sw.OwnedOptimizer([split.weight], torch.optim.Muon)


@on_ranks(2)
def test_a_step_that_failed_is_not_gone_on_from(rank: int, world: int) -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError("no")

    net = sharded(world, "whole")
    optimizer = sw.OwnedOptimizer(net.matrices(), Fails, lr=0.1)
    set_gradients(net.matrices(), 0)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    with pytest.raises(EngineError, match="has failed \\(no\\)"):
        optimizer.step()


def test_owners_share_the_work() -> None:
    """Heaviest first: no rank has more than the mean and one matrix beside it."""
    shapes = [(64, 64), (128, 32), (32, 128), (256, 16), (48, 48)] * 7
    for ranks in range(1, 8):
        owners = share_out(shapes, ranks)
        work = [0] * ranks
        for shape, owner in zip(shapes, owners, strict=True):
            work[owner] += work_of(shape)
        assert max(work) <= sum(work) / ranks + max(map(work_of, shapes))
        assert share_out(shapes, ranks) == owners
