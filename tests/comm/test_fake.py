"""The fake transport: no process group, any number of ranks, own data in place, a full record."""

from __future__ import annotations

import random

import pytest
import torch
from axes import alone
from hypothesis import given

from layouts import buckets, fill_shard, gathered, random_whole, rows_of
from shardwise.comm.fake import FakeTransport, Recorded
from shardwise.comm.transport import Axis, Position, Transport
from shardwise.layout import (
    BucketLayout,
    MixedPrecisionPolicy,
    ParamSpec,
    layout_reduce,
    layout_unit,
    strategy_named,
)

CPU = torch.device("cpu")


def fake_of(world: int, rank: int = 0, replicas: int = 1) -> FakeTransport:
    shard = Axis("shard", tuple(range(world)), rank, None)
    return FakeTransport(shard, Axis("replicate", tuple(range(replicas)), 0, None))


@given(buckets())
def test_own_rows_in_their_place_and_zeros_elsewhere(layout: BucketLayout) -> None:
    rank = random.Random(layout.chunk_numel).randrange(layout.world)
    transport = fake_of(layout.world, rank)
    bucket, whole = transport.attach("unit[0]", layout, CPU), random_whole(layout, 2)
    fill_shard(bucket.buffer, layout, whole, rank)
    out = torch.ones(layout.full_numel).to(layout.gather_dtype)
    transport.gather(bucket, bucket.buffer, out).wait()
    for param, expected, found in zip(layout.params, whole, gathered(out, layout), strict=True):
        mine = rows_of(expected, param, rank)
        assert torch.equal(rows_of(found, param, rank), mine.to(layout.gather_dtype))
        assert found.count_nonzero() == mine.to(layout.gather_dtype).count_nonzero()


@given(buckets())
def test_own_gradients_are_all_there_is(layout: BucketLayout) -> None:
    rank = layout.world - 1
    transport, reduce = fake_of(layout.world, rank), layout_reduce(layout)
    bucket = transport.attach("unit[0]", layout, CPU)
    out = torch.empty(reduce.chunk_numel, dtype=reduce.dtype)
    buffer = transport.grad_buffer(bucket, reduce, out, 0.5)
    grads = [torch.full(p.spec.shape, 2.0) for p in reduce.params]
    for index, grad in enumerate(grads[:-1]):
        buffer.put(index, grad)
        buffer.put(index, grad)
    transport.reduce(bucket, buffer, out, 4.0).wait()
    for index, (param, at) in enumerate(zip(reduce.params, reduce.offsets(rank), strict=True)):
        arrived = index < len(grads) - 1
        assert buffer.had[index] == arrived
        numel = param.shard_numel(rank)
        assert out[at : at + numel].tolist() == [8.0 if arrived else 0.0] * numel
        assert out[reduce.counts_offset + index] == (4.0 if arrived else 0.0)


@pytest.mark.parametrize("name", ["full_shard", "hybrid_shard"])
def test_record_of_a_step_is_what_the_layout_says(name: str) -> None:
    replicas = 2 if name == "hybrid_shard" else 1
    specs = [ParamSpec("w", (4096, 8), torch.float32), ParamSpec("b", (3,), torch.bfloat16)]
    unit = layout_unit(
        "layers.0",
        specs,
        strategy=strategy_named(name),
        policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        world=1024,
        replicas=replicas,
    )
    transport = fake_of(1024, rank=700, replicas=replicas)
    for index, layout in enumerate(unit.buckets):
        bucket = transport.attach(f"layers.0[{index}]", layout, CPU)
        full = torch.empty(layout.full_numel, dtype=layout.gather_dtype)
        for _ in ("forward", "backward"):
            transport.gather(bucket, bucket.buffer, full).wait()
        reduce = layout_reduce(layout)
        out = torch.empty(reduce.chunk_numel, dtype=reduce.dtype)
        buffer = transport.grad_buffer(bucket, reduce, out)
        transport.reduce(bucket, buffer, out, 1 / 1024).wait()
        transport.all_reduce(bucket, out).wait()
    recorded = sorted((r.kind, r.size_bytes) for r in transport.record)
    assert recorded == sorted((c.kind, c.size_bytes) for c in unit.collectives())
    assert transport.record[0] == Recorded("gather", "layers.0[0]", 4 * 8 * 2)


def test_axes_of_size_one_leave_no_entry() -> None:
    transport = FakeTransport(alone("shard", 0), alone("replicate", 0))
    unit = layout_unit(
        "head",
        [ParamSpec("w", (4,), torch.float32)],
        strategy=strategy_named("no_shard"),
        policy=MixedPrecisionPolicy(),
        world=1,
    )
    bucket = transport.attach("head[0]", unit.buckets[0], CPU)
    bucket.buffer.fill_(3.0)
    full = torch.empty(unit.buckets[0].full_numel)
    transport.gather(bucket, bucket.buffer, full)
    assert full.tolist() == [3.0] * full.numel()
    assert transport.agree([True, False]) == [True, False]
    assert transport.record == []


def test_it_serves_the_protocol_on_meta_too() -> None:
    transport = fake_of(8, rank=3)
    assert isinstance(transport, Transport)
    position = Position(0, "forward", "head")
    transport.enter(position)
    transport.leave(position)
    layout = layout_unit(
        "head",
        [ParamSpec("w", (64, 4), torch.float32), ParamSpec("s", (), torch.float32)],
        strategy=strategy_named("full_shard"),
        policy=MixedPrecisionPolicy(),
        world=8,
    ).buckets[0]
    meta = torch.device("meta")
    bucket = transport.attach("head[0]", layout, meta)
    transport.gather(bucket, bucket.buffer, torch.empty(layout.full_numel, device=meta)).wait()
    assert transport.agree([True]) == [True]
    assert [r.kind for r in transport.record] == ["gather", "agree"]
    with pytest.raises(ValueError, match="the layout is for 8 ranks, axis 'shard' has 4"):
        fake_of(4).attach("head[0]", layout, CPU)
