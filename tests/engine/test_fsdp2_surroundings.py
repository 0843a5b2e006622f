"""What surrounds a sharded model in real scripts: loaders that fork, threads, contexts, copies."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from fsdp2_kit import (
    OURS,
    both,
    close,
    engines,
    inputs,
    mean_gradients,
    mesh_of,
    same_parts,
    shard_tower,
    tower,
)
from torch.utils.data import DataLoader

from ranks import on_ranks


def step(model: Any, plain: Any, rank: int, number: int = 0) -> None:
    for m in (model, plain):
        m.zero_grad()
        m(inputs(rank, number)).square().sum().backward()
    mean_gradients(plain)
    same_parts(model, plain)


@engines
@on_ranks(2)
def test_loader_workers_that_fork_after_sharding(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh_of(world))
    step(model, plain, rank)
    rows = [inputs(rank, i)[0] for i in range(8)]
    for epoch in range(2):
        for x in DataLoader(rows, 4, num_workers=1, multiprocessing_context="fork"):
            for m in (model, plain):
                m.zero_grad()
                m(x).square().sum().backward()
            mean_gradients(plain)
            same_parts(model, plain)
        step(model, plain, rank, epoch)


@engines
@on_ranks(2)
def test_a_step_on_another_thread(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh_of(world))
    for number in range(2):
        failures: list[BaseException] = []

        def run(number: int = number, failures: Any = failures) -> None:
            try:
                step(model, plain, rank, number)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]
    step(model, plain, rank, 3)


@engines
@on_ranks(2)
def test_saved_tensors_elsewhere(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(3))
    shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=True)
    for m in (model, plain):
        with torch.autograd.graph.save_on_cpu():
            out = m(inputs(rank))
        out.square().sum().backward()
    mean_gradients(plain)
    same_parts(model, plain)


@pytest.mark.parametrize("reshard", [True, False])
@engines
@on_ranks(2)
def test_two_losses_of_one_graph(engine: str, reshard: bool, rank: int, world: int) -> None:
    model, plain = both(tower(3))
    shard_tower(engine, model, mesh=mesh_of(world), reshard_after_forward=reshard)
    for m in (model, plain):
        out = m(inputs(rank))
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
    mean_gradients(plain)
    same_parts(model, plain)


@engines
@on_ranks(2)
def test_autocast(engine: str, rank: int, world: int) -> None:
    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh_of(world))
    for m in (model, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = m(inputs(rank))
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
    mean_gradients(plain)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(p.grad.full_tensor(), q.grad, "gradient", 2e-2)


@pytest.mark.parametrize("engine", OURS)
@on_ranks(2)
def test_an_average_that_is_gathered_says_so(engine: str, rank: int, world: int) -> None:
    """A forward with gradients and no backward leaves the root's own unit gathered."""
    model = shard_tower(engine, tower(2, gain=True), mesh=mesh_of(world))
    average = copy.deepcopy(model)

    def update() -> None:
        with torch.no_grad():
            for p, q in zip(average.parameters(), model.parameters(), strict=True):
                p.add_(q)

    average(inputs(rank))
    with pytest.raises(RuntimeError, match=r"gain.*whose unit is gathered.*reshard\(\)"):
        update()
    average.reshard()
    update()
    with torch.no_grad():
        average(inputs(rank))
    update()
