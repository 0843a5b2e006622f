"""What the engine does on accelerators only, on CPU ranks over Gloo: rows padded to equal parts,
gradients held until their unit is complete, and buckets of large parameters gathered and reduced
where they are, by one group of collectives. The bits are those of a plain model.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import (
    OPTIMIZERS,
    Blocks,
    Mlp,
    Plain,
    Setting,
    Uneven,
    batch,
    expected,
    loss_of,
    make,
    same_grads,
    same_weights,
)
from torch.distributed.tensor import Shard

import shardwise as sw
from ranks import on_ranks
from shardwise.comm import streams
from shardwise.comm.c10d import in_place, memory, transport
from shardwise.comm.c10d.memory import GroupMemory
from shardwise.comm.kept import kept
from shardwise.engine.core.state import unit_of, units_in


class AsOnDevice(streams.NoStreams):
    is_async = True


@contextlib.contextmanager
def as_on_device(*, large_bytes: int) -> Iterator[None]:
    """Parameters of `large_bytes` on average are large; the backend starts collectives as one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(streams.MAKERS, "cpu", lambda device: AsOnDevice())
        patch.setattr(transport, "coalesces", lambda group, device: True)
        patch.setattr(in_place, "LARGE_BYTES", large_bytes)
        _forget()
        yield
    _forget()


def _forget() -> None:
    streams.streams_for.cache_clear()
    kept("transports").clear()


class Strided(nn.Module):
    """Gradients that are transposed, expanded, and of one element."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([StridedLayer() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class StridedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Parameter(torch.randn(8, 8))
        self.summed = nn.Parameter(torch.randn(6, 2))
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.einsum("bi,oi->bo", x, self.mixed)) * self.summed.sum() * self.scale


def layouts(model: nn.Module) -> list[Any]:
    return [b.layout for unit in units_in(model) for b in unit.buckets]


@pytest.mark.parametrize("large_bytes", [0, 2**40], ids=["in place", "packed"])
@pytest.mark.parametrize("cls", [Mlp, Uneven, Blocks, Strided])
@pytest.mark.parametrize(
    "setting", [Setting("full_shard"), Setting("shard_grad_op"), Setting(None, reshard=1)], ids=str
)
@on_ranks(2, 3)
def test_training_has_the_bits_of_a_plain_model(
    rank: int, world: int, setting: Setting, cls: type[nn.Module], large_bytes: int
) -> None:
    with as_on_device(large_bytes=large_bytes):
        model = setting.shard(make(cls), world)
        opt = OPTIMIZERS["adamw"](model.parameters())
        for step, (grads, weights) in enumerate(expected(cls, world, "adamw", 3)):
            loss_of(model(batch(model, step, rank))).backward()
            same_grads(model, grads, f"step {step}", exact=world == 2)
            opt.step()
            opt.zero_grad()
            same_weights(model, weights, f"step {step}", exact=world == 2)


class Mixed(nn.Module):
    """A matrix cut along its columns in front of vectors with a short last part."""

    features = 13

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, 13))
        self.gain, self.last = nn.Parameter(torch.randn(13)), nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.gain) @ self.mix.t() * self.last.sum()


@on_ranks(3)
def test_columns_beside_rows(rank: int, world: int) -> None:
    """Nothing is padded where that does not make all parts equal."""

    def columns(param: nn.Parameter) -> Any:
        return Shard(1) if param.ndim == 2 else None

    with as_on_device(large_bytes=2**40):
        model = Setting("full_shard").shard(make(Mixed), world, shard_placement_fn=columns)
        assert not any(p.is_padded for layout in layouts(model) for p in layout.params)
        loss_of(model(batch(model, 0, rank))).backward()
        plain = Plain(make(Mixed), world)
        plain.step(0)
        wanted = plain.grads()
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad.full_tensor(), wanted[name])


@on_ranks(2)
def test_uneven_rows_are_padded(rank: int, world: int) -> None:
    with as_on_device(large_bytes=2**40):
        padded = layouts(Setting("full_shard").shard(make(Uneven), world))
    exact = layouts(Setting("full_shard").shard(make(Uneven), world))
    assert all(layout.is_regular for layout in padded)
    assert not any(param.is_padded for layout in exact for param in layout.params)
    assert any(param.is_padded for layout in padded for param in layout.params)


class Choice(nn.Module):
    """Parameters of one unit of which a forward may leave some out."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.always, self.perhaps, self.never = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, *, takes: bool) -> torch.Tensor:
        x = torch.tanh(self.always(x))
        return self.perhaps(x) if takes else x


@pytest.mark.parametrize("large_bytes", [0, 2**40], ids=["in place", "packed"])
@on_ranks(2)
def test_a_gradient_that_some_rank_lacks(rank: int, world: int, large_bytes: int) -> None:
    """One that no rank has stays None, one that a single rank has is halved."""
    with as_on_device(large_bytes=large_bytes):
        model = Setting("full_shard").shard(make(Choice), world)
        loss_of(model(batch(model, 0, rank), takes=rank == 0)).backward()
        plain = make(Choice)
        for member in range(world):
            loss = loss_of(plain(batch(model, 0, member), takes=member == 0))
            (loss / world).backward()
        same_grads(model, {n: p.grad for n, p in plain.named_parameters()})


@pytest.mark.parametrize("large_bytes", [0, 2**40], ids=["in place", "packed"])
@on_ranks(2)
def test_accumulation_without_sync(rank: int, world: int, large_bytes: int) -> None:
    with as_on_device(large_bytes=large_bytes):
        model = Setting("full_shard").shard(make(Uneven), world)
        with sw.no_sync(model):
            loss_of(model(batch(model, 0, rank))).backward()
        loss_of(model(batch(model, 1, rank))).backward()
        plain = Plain(make(Uneven), world)
        plain.backward(*([batch(model, s, r) for s in (0, 1)] for r in range(world)))
        same_grads(model, plain.grads())


@pytest.mark.parametrize("large_bytes", [0, 2**40], ids=["in place", "packed"])
@on_ranks(2)
def test_reproducible_sums(rank: int, world: int, large_bytes: int) -> None:
    """With a parameter that no rank has a gradient of."""

    def weights() -> dict[str, torch.Tensor]:
        model = Setting("full_shard").shard(make(Choice), world)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        with sw.reproducible(model, opt, num_micro_batches=3, seed=0) as run:
            for step in range(2):
                for micro in run.micro_batches(step):
                    loss_of(model(batch(model, step, micro.index), takes=False)).backward()
                assert model.perhaps.weight.grad is None
                opt.step()
                opt.zero_grad()
        return {n: p.full_tensor().detach() for n, p in model.named_parameters()}

    with as_on_device(large_bytes=large_bytes):
        found = weights()
    same_weights_as = weights()
    assert all(torch.equal(found[n], same_weights_as[n]) for n in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("large_bytes", [0, 2**40], ids=["in place", "packed"])
@on_ranks(2)
def test_mixed_precision(rank: int, world: int, large_bytes: int, dtype: torch.dtype) -> None:
    """The same bits as with the layout and the collectives of CPU ranks."""

    def weights(reduce: torch.dtype) -> list[torch.Tensor]:
        policy = sw.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce)
        model = Setting("full_shard").shard(make(Uneven), world, mp_policy=policy)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss_of(model(batch(model, step, rank))).backward()
            opt.step()
            opt.zero_grad()
        return [p.to_local().clone() for p in model.parameters()]

    for reduce in (torch.float32, dtype):
        with as_on_device(large_bytes=large_bytes):
            found = weights(reduce)
        assert all(map(torch.equal, found, weights(reduce))), reduce


@pytest.mark.parametrize("on_device", [False, True])
@on_ranks(2)
def test_reductions_over_a_group_of_their_own(rank: int, world: int, on_device: bool) -> None:
    around = as_on_device(large_bytes=0) if on_device else contextlib.nullcontext()
    with around:
        model = Setting("full_shard").shard(make(Uneven), world)
        model.set_separate_reduce_scatter_group()
        buckets = [b.bucket for unit in units_in(model) for b in unit.buckets]
        groups = {id(bucket.group_of_sums) for bucket in buckets}
        assert len(groups) == 1 and id(buckets[0].shard.group) not in groups
        loss_of(model(batch(model, 0, rank))).backward()
        same_grads(model, expected(Uneven, world, "sgd", 1)[0][0])
        copied = [b.bucket for unit in units_in(copy.deepcopy(model)) for b in unit.buckets]
        assert {id(bucket.group_of_sums) for bucket in copied} == groups, "also of a copy"
        model.set_separate_reduce_scatter_group(False)
        assert all(bucket.group_of_sums is bucket.shard.group for bucket in buckets)


@on_ranks(2)
def test_staging_from_the_memory_of_a_group(
    rank: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit that was asked, and no other."""
    asked: list[tuple[int, ...]] = []
    own = GroupMemory.allocate

    def allocate(self: GroupMemory, size: tuple[int, ...], **options: Any) -> torch.Tensor:
        asked.append(size)
        return own(self, size, **options)

    monkeypatch.setattr(GroupMemory, "allocate", allocate)
    model = Setting("full_shard").shard(make(Mlp), world)
    model.layers[1].set_allocate_memory_from_process_group_for_comm(True)
    for step in range(2):
        model.zero_grad()
        loss_of(model(batch(model, step, rank))).backward()
    plain = Plain(make(Mlp), world)
    plain.step(1)
    same_grads(model, plain.grads())
    assert len(asked) == 6, "two gathers and a reduction of each step"


@on_ranks(2)
def test_gathers_in_symmetric_memory(
    rank: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that CUDA would get, on CPU ranks: all staging is of the pool, and ranks meet over
    it before they gather.
    """
    calls: list[str] = []
    pool: list[torch.Tensor] = []

    class Symmetric:
        set_backend = staticmethod(lambda backend: calls.append(f"backend {backend}"))

        @staticmethod
        def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
            return any(tensor is held for held in pool)

        @staticmethod
        def rendezvous(tensor: torch.Tensor, group: str) -> None:
            calls.append("meet")

    own = memory.SymmetricGather.allocate

    def allocate(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        pool.append(own(self, *args, **options))
        return pool[-1]

    monkeypatch.setattr(memory, "symmetric_memory", lambda: Symmetric)
    monkeypatch.setattr(memory, "_pool", lambda symmetric, device: contextlib.nullcontext())
    monkeypatch.setattr(memory.SymmetricGather, "allocate", allocate)
    model = Setting("full_shard").shard(make(Mlp), world)
    unit = unit_of(model.layers[1])
    unit.settings.symmetric_backend = "NCCL"
    unit.tell_transport()
    unit.tell_transport()  # as a rebuild does: set up once
    loss_of(model(batch(model, 0, rank))).backward()
    plain = Plain(make(Mlp), world)
    plain.step(0)
    same_grads(model, plain.grads())
    assert calls == ["backend NCCL", "meet", "meet"] and len(pool) == 2
