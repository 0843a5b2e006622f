"""What is found before anything is trained, and divergence that c10d would hide."""

import copy
import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.tensor import distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from ranks import on_ranks
from shardwise.engine.guards.audit import checksum
from shardwise.errors import DivergenceError, PeerTimeoutError


def test_checksums_see_values_places_and_tails() -> None:
    base = torch.arange(20_001, dtype=torch.float32)
    swapped = base.clone()
    swapped[0], swapped[10_000] = base[10_000], base[0]
    changed = base.clone()
    changed[-1] += 1
    sums = [tuple(checksum(t).tolist()) for t in (base, base.clone(), swapped, changed)]
    assert sums[0] == sums[1] and len(set(sums)) == 3
    odd = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    assert not torch.equal(checksum(odd), checksum(odd.flip(0)[:4]))


def test_a_checksum_takes_few_operators() -> None:
    """On an accelerator each is a launch: there were one for 16 KiB."""

    class Counting(TorchDispatchMode):
        num_operators = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.num_operators += 1
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        checksum(torch.ones(2**22))
    assert counting.num_operators < 40, "of 16 MiB"


@on_ranks(2)
def test_different_weights_and_buffers_become_those_of_the_first_rank(
    rank: int, world: int
) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(rank)
    starts: list = [None] * world
    dist.all_gather_object(starts, {n: v.clone() for n, v in model.state_dict().items()})
    shardwise.fully_shard(model)
    got = {
        n: v.full_tensor() if hasattr(v, "full_tensor") else v
        for n, v in model.state_dict().items()
    }
    assert all(torch.equal(got[n], starts[0][n]) for n in got)


@on_ranks(2)
def test_optimizers_built_too_early_train_the_shards(rank: int, world: int) -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    ref = copy.deepcopy(model)
    early = torch.optim.SGD(model.parameters(), lr=0.5)
    shardwise.fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    ref(torch.ones(2, 4)).sum().backward()
    early.step()
    torch.optim.SGD(ref.parameters(), lr=0.5).step()
    assert torch.equal(model.weight.full_tensor(), ref.weight)
    assert early.param_groups[0]["params"][0] is model.weight


@on_ranks(2)
def test_an_optimizer_with_state_of_the_old_tensors_is_refused(rank: int, world: int) -> None:
    model = nn.Linear(4, 3)
    early = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    early.step()
    early.zero_grad()
    shardwise.fully_shard(model)
    with pytest.raises(shardwise.errors.EngineError, match="holds state for the tensor"):
        model(torch.ones(2, 4))


@on_ranks(2)
def test_state_of_assigned_shards_follows(rank: int, world: int) -> None:
    """Accelerate assigns shards, gives them to the optimizer and loads its state; then comes the
    first forward.
    """
    model, ref = nn.Linear(4, 3), nn.Linear(4, 3)
    ref.load_state_dict(model.state_dict())
    shardwise.fully_shard(model)
    shards = {
        n: distribute_tensor(t.detach(), p.device_mesh, p.placements)
        for (n, t), p in zip(ref.state_dict().items(), model.parameters(), strict=True)
    }
    model.load_state_dict(shards, assign=True)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, ref)]
    for optimizer in optimizers:
        for param in optimizer.param_groups[0]["params"]:
            moments = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.ones_like(param)}
            optimizer.state[param] = {"step": torch.tensor(3.0), **moments}
    for m, optimizer in zip((model, ref), optimizers, strict=True):
        m(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert optimizers[0].param_groups[0]["params"][0] is model.weight
    assert set(optimizers[0].state) == set(model.parameters())
    assert optimizers[0].state[model.weight]["step"] == 4
    torch.testing.assert_close(model.weight.full_tensor(), ref.weight)


@on_ranks(2)
def test_a_layer_outside_of_every_unit_is_named(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    shardwise.fully_shard(model[0])
    with pytest.raises(RuntimeError, match=r"no unit owns: 1\.weight, 1\.bias"):
        model(torch.ones(2, 4))
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    shardwise.fully_shard(other[0], ignored_params=set(other[1].parameters()))
    other(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_what_nobody_filled_after_to_empty_is_named(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    shardwise.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"still on the meta device: 0\.weight"):
        model(torch.ones(2, 4))
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    with pytest.raises(RuntimeError, match=r"never initialised .*1\.weight, 1\.bias"):
        model(torch.ones(2, 4))


@on_ranks(2)
def test_a_write_into_a_gathered_copy_is_named(rank: int, world: int) -> None:
    class Writes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = Writes(4, 4)
    shardwise.fully_shard(model, reshard_after_forward=True)
    with pytest.raises(shardwise.errors.EngineError, match="weight: written in place while"):
        model(torch.ones(2, 4))


class Choosy(nn.Module):
    """Runs the layers it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
        for i in which:
            x = self.layers[i](x)
        return x


def choosy(transport: str) -> Choosy:
    model = Choosy()
    for layer in model.layers:
        shardwise.fully_shard(layer, transport=transport)
    return shardwise.fully_shard(model, transport=transport)


@on_ranks(2)
def test_units_that_differ_between_ranks_are_named_on_c10d(rank: int, world: int) -> None:
    model = choosy("c10d")
    model(torch.ones(2, 4), (0, 1, 2)).sum().backward()
    with pytest.raises(DivergenceError, match=r"layers\.1.*layers\.2|layers\.2.*layers\.1"):
        model(torch.ones(2, 4), (0, 1 + rank))
    dist.destroy_process_group()  # one rank may have issued what the other one held back


@on_ranks(2, timeout_s=60)
def test_a_unit_that_one_rank_skips_is_named_on_c10d(rank: int, world: int) -> None:
    model = choosy("c10d")
    model(torch.ones(2, 4), (0, 1, 2)).sum().backward()
    with pytest.raises((PeerTimeoutError, DivergenceError)) as caught:
        model(torch.ones(2, 4), (0, 1) if rank else (0, 1, 2))
    assert f"rank {1 - rank}" in str(caught.value)
    if rank == 0:  # it waits in the gather; the other one may only learn that this has failed
        assert "gather of layers.2[0]" in str(caught.value)
    dist.destroy_process_group()  # it holds a gather without a partner: the pool makes new ranks


@on_ranks(2)
def test_trainable_parameters_that_are_ignored_are_named(rank: int, world: int) -> None:
    """Once; not those that are frozen, or that a hook reduces, or DDP."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)

    def told(prepare: Any, wrap: Any = lambda m: m) -> list[str]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        prepare(model[1])
        shardwise.fully_shard(model[0], ignored_params=set(model[1].parameters()))
        shardwise.fully_shard(model, ignored_params=set(model[1].parameters()))
        wrap(model[1])
        records.clear()
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            nn.Linear(2, 2)  # a module that is made looks like a change
        return [r.getMessage() for r in records]

    def hooked(m: Any) -> None:
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(world)))

    (text,) = told(lambda m: None)
    assert "1.weight, 1.bias" in text and "register_post_accumulate_grad_hook" in text
    assert not told(lambda m: m.requires_grad_(False))
    assert not told(hooked)
    assert not told(lambda m: None, replicate)
    logging.getLogger("shardwise").removeHandler(handler)


@on_ranks(2)
def test_a_rank_that_comes_late_to_fully_shard_is_waited_for(rank: int, world: int) -> None:
    """It may read its weights for minutes; the limit of waits is for ranks that train already."""
    shardwise.set_wait_limit(1.0)
    try:
        if rank == 1:
            time.sleep(4.0)
        shardwise.fully_shard(nn.Linear(4, 4), transport="c10d")
    finally:
        shardwise.set_wait_limit()
