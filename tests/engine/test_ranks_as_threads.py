"""Ranks that are threads of one process, over torch's threaded process group.

Torch's own tests of FSDP2, and tests that users write after them, run like this
(`MultiThreadedTestCase`). Nothing of the engine may take "this process" for "this rank".
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from fsdp2_kit import TwoLayer, inputs, part_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

import shardwise as sw
from shardwise.errors import TransportError


@pytest.fixture
def on_threads() -> Iterator[Callable[..., None]]:
    """`run(world, body)` calls body(rank, world) on threads and raises what they raise."""
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    _install_threaded_pg()

    def run(world: int, body: Callable[[int, int], None]) -> None:
        store, errors = dist.HashStore(), []

        def one(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
                body(rank, world)
                dist.destroy_process_group()
            except BaseException as error:
                errors.append(error)
                ProcessLocalGroup.exception_handle(error)

        threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        ProcessLocalGroup.reset()
        if errors:
            raise errors[0]

    yield run
    _uninstall_threaded_pg()
    isolate(False)


def model_of(n: int = 3) -> nn.Sequential:
    """Equal on all ranks without the generator, which threads share."""
    model = nn.Sequential(*(TwoLayer() for _ in range(n)))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(torch.arange(p.numel()).mul(i + 1).sin().view(p.shape))
    return model


def step_is_right(model: Any, plain: Any, rank: int, world: int) -> None:
    for m in (model, plain):
        m(inputs(rank)).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        mean = q.grad.clone()
        dist.all_reduce(mean)
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.to_local(), part_of(mean / world, p))


def trains(rank: int, world: int) -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    for mesh, reshard in ((None, True), (grid, False)):
        model = model_of()
        plain = copy.deepcopy(model)
        for block in (*model, model):
            sw.fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.to_local(), part_of(q, p))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
        step_is_right(model, plain, rank, world)
        optimizers[0].step()
        for name, value in model.state_dict().items():
            assert value.full_tensor().shape == plain.state_dict()[name].shape


def test_training(on_threads: Callable[..., None]) -> None:
    on_threads(4, trains)


def meta(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(TwoLayer(buffer=True) for _ in range(2)))
    for block in (*model, model):
        sw.fully_shard(block)
    with pytest.raises(RuntimeError, match=r"meta.*0\.up\.weight"):
        model(inputs(rank))
    model.to_empty(device="cpu")
    whole = {n: torch.arange(p.numel()).sin().view(p.shape) for n, p in model.state_dict().items()}
    model.load_state_dict(whole)
    plain = nn.Sequential(*(TwoLayer(buffer=True) for _ in range(2)))
    plain.load_state_dict(whole)
    step_is_right(model, plain, rank, world)


def test_meta_initialisation(on_threads: Callable[..., None]) -> None:
    on_threads(2, meta)


def refuses_shared_memory(rank: int, world: int) -> None:
    with pytest.raises(TransportError, match="threads of one process"):
        sw.fully_shard(model_of(1), transport="shared_memory")


def test_shared_memory_says_why_it_cannot(on_threads: Callable[..., None]) -> None:
    on_threads(2, refuses_shared_memory)


def test_worlds_after_one_another(on_threads: Callable[..., None]) -> None:
    """Groups that are gone leave nothing that a later world of the same ranks would meet."""
    for _ in range(3):
        on_threads(2, meta)
