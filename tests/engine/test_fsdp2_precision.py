"""Mixed precision: which dtype is computed, reduced, accumulated, returned; what is never cast."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from fsdp2_kit import TwoLayer, both, close, engines, fs, inputs, mesh_of, shard_tower, tower
from torch.distributed.tensor import Shard

from ranks import on_ranks

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@contextlib.contextmanager
def reduced_dtypes() -> Iterator[list[torch.dtype]]:
    """The dtypes that go into reduce-scatters inside."""
    seen: list[torch.dtype] = []
    original = dist.reduce_scatter_single

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append((args[0] if args else kwargs["output"]).dtype)
        return original(*args, **kwargs)

    dist.reduce_scatter_single = noting
    try:
        yield seen
    finally:
        dist.reduce_scatter_single = original


def largest(param: nn.Parameter) -> Shard:
    return Shard(max(range(param.ndim), key=param.size))


@engines
@on_ranks(2)
def test_compute_in_bf16_reduce_in_fp32(engine: str, rank: int, world: int) -> None:
    for placement in (None, largest):
        model, plain = both(tower(2))
        policy = fs(engine).MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
        shard_tower(
            engine, model, mesh=mesh_of(world), mp_policy=policy, shard_placement_fn=placement
        )
        low = copy.deepcopy(plain).to(BF16)
        with reduced_dtypes() as seen:
            loss = model(inputs(rank)).sum()
            loss.backward()
        assert seen == [F32, F32]
        want = low(inputs(rank).to(BF16)).sum()
        want.backward()
        assert torch.equal(loss, want)
        for p, q in zip(model.parameters(), low.parameters(), strict=True):
            mean = q.grad.float()
            dist.all_reduce(mean)
            assert p.dtype == p.grad.dtype == F32
            close(p.grad.full_tensor(), mean / world, "gradient")


@engines
@on_ranks(2)
def test_compute_in_fp32_reduce_in_bf16(engine: str, rank: int, world: int) -> None:
    for after in (False, True):
        model, plain = both(tower(2))
        policy = fs(engine).MixedPrecisionPolicy(reduce_dtype=BF16)
        shard_tower(engine, model, mesh=mesh_of(world), mp_policy=policy)
        if after:  # the reduce dtype is the policy's, whatever happens to the model
            model.to(F32)
        with reduced_dtypes() as seen:
            model(inputs(rank)).sum().backward()
        assert seen == [BF16, BF16]
        plain(inputs(rank)).sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            mean = q.grad.to(BF16)
            dist.all_reduce(mean)
            close(p.grad.full_tensor(), (mean / world).float(), "gradient", 1e-2)


@engines
@on_ranks(2)
def test_accumulation_in_the_reduce_dtype(engine: str, rank: int, world: int) -> None:
    """bf16 gradients of many micro-batches add up in fp32."""
    model, plain = both(tower(2))
    policy = fs(engine).MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
    shard_tower(engine, model, mesh=mesh_of(world), mp_policy=policy)
    low = copy.deepcopy(plain).to(BF16)
    total = [torch.zeros_like(p) for p in plain.parameters()]
    for micro in range(5):
        model.set_requires_gradient_sync(micro == 4)
        model(inputs(rank, micro)).sum().backward()
        low(inputs(rank, micro).to(BF16)).sum().backward()
        for t, p in zip(total, low.parameters(), strict=True):
            t += p.grad.float()
            p.grad = None
    for p, t in zip(model.parameters(), total, strict=True):
        dist.all_reduce(t)
        close(p.grad.full_tensor(), t / world, "gradient")


@engines
@on_ranks(2)
def test_float16_with_a_gradient_scaler(engine: str, rank: int, world: int) -> None:
    """inf on one rank skips the step on all."""
    from torch.amp import GradScaler

    model, plain = both(tower(2))
    shard_tower(engine, model, mesh=mesh_of(world))
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.full_tensor() for p in model.parameters()]
    scaler.scale(model(inputs(rank)).sum()).backward()
    if rank == world - 1:
        next(model.parameters()).grad.to_local()[0, 0] = float("inf")
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert all(
        torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters(), strict=True)
    )
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    plain(inputs(rank)).sum().backward()
    scaler.scale(model(inputs(rank)).sum()).backward()
    scaler.unscale_(optimizer)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(q.grad)
        close(p.grad.full_tensor(), q.grad / world, "unscaled gradient")
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before[0], next(model.parameters()).full_tensor())


@dataclasses.dataclass
class Batch:
    values: torch.Tensor
    ids: torch.Tensor


@engines
@on_ranks(2)
def test_inputs_are_cast_in_any_container(engine: str, rank: int, world: int) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, batch: Any, nested: Any, *, named: Any) -> torch.Tensor:
            self.dtypes = (batch.values.dtype, batch.ids.dtype, nested[0]["x"].dtype, named.dtype)
            return self.lin(batch.values) + nested[0]["x"] + named

    for cast in (True, False):
        model = Looks()
        policy = fs(engine).MixedPrecisionPolicy(
            param_dtype=BF16, output_dtype=F32, cast_forward_inputs=cast
        )
        fs(engine).fully_shard(model, mesh=mesh_of(world), mp_policy=policy)
        dtype = F32 if cast else BF16
        x = inputs(rank).to(dtype)
        out = model(Batch(x, torch.arange(3)), [{"x": x}], named=x)
        assert model.dtypes == (BF16, torch.int64, BF16, BF16)
        assert out.dtype == F32


@engines
@on_ranks(2)
def test_policies_of_one_sub_module(engine: str, rank: int, world: int) -> None:
    seen: dict[str, torch.dtype] = {}
    model = nn.Sequential(TwoLayer(), TwoLayer(), TwoLayer())
    for i, block in enumerate(model):
        block.register_forward_pre_hook(
            lambda m, args, i=i: seen.__setitem__(str(i), args[0].dtype)
        )
    policy = fs(engine).MixedPrecisionPolicy
    fs(engine).fully_shard(
        model[1], mesh=mesh_of(world), mp_policy=policy(param_dtype=BF16, output_dtype=F32)
    )
    fs(engine).fully_shard(model, mesh=mesh_of(world))
    out = model(inputs(rank))
    assert seen["0"] == seen["2"] == out.dtype == F32
    out.sum().backward()
    assert all(p.grad.dtype == F32 for p in model.parameters())


@engines
@on_ranks(2)
def test_norms_and_their_buffers(engine: str, rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model.register_buffer("table", torch.ones(3))
    policy = fs(engine).MixedPrecisionPolicy(param_dtype=BF16)
    fs(engine).fully_shard(model[1], mesh=mesh_of(world), mp_policy=policy)
    fs(engine).fully_shard(model, mesh=mesh_of(world), mp_policy=policy)
    out = model(inputs(rank))
    out.sum().backward()
    assert out.dtype == BF16 and model.table.dtype == F32


@engines
@on_ranks(2)
def test_batch_norm_statistics_stay_in_fp32(engine: str, rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    policy = fs(engine).MixedPrecisionPolicy
    low = policy(param_dtype=BF16)
    fs(engine).fully_shard(model[1], mesh=mesh_of(world), mp_policy=policy(output_dtype=BF16))
    fs(engine).fully_shard(model, mesh=mesh_of(world), mp_policy=low)
    model[0].register_forward_hook(lambda m, a, out: out.float())
    model(inputs(rank)).sum().backward()
    assert model[1].running_mean.dtype == F32
    assert model[1].running_mean.abs().sum() > 0
