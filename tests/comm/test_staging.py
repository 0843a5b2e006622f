"""Staging of one rank, without a process group: memory between uses, and one call or many."""

from __future__ import annotations

import weakref

import pytest
import torch

from shardwise.comm.c10d.bucket import C10dBucket
from shardwise.comm.c10d.packed_grads import (
    BATCHED_BYTES,
    PackedGrads,
    ReducePlan,
    ReduceStaging,
)
from shardwise.comm.c10d.staging import GatherPlan, GatherStaging
from shardwise.comm.transport import Axis
from shardwise.layout import (
    BucketLayout,
    MixedPrecisionPolicy,
    ParamSpec,
    layout_reduce,
    layout_unit,
    strategy_named,
)

WORLD = 4


def bucket_of(*shapes: tuple[int, ...], shard_dim: int = 0) -> C10dBucket:
    specs = [
        ParamSpec(f"p{i}", shape, torch.float32, True, shard_dim) for i, shape in enumerate(shapes)
    ]
    unit = layout_unit(
        "u",
        specs,
        strategy=strategy_named("full_shard"),
        policy=MixedPrecisionPolicy(),
        world=WORLD,
    )
    layout: BucketLayout = unit.buckets[0]
    shard, alone = Axis("shard", tuple(range(WORLD)), 1, None), Axis("replicate", (0,), 0, None)
    return C10dBucket("u[0]", layout, shard, alone, torch.zeros(layout.chunk_numel))


def grads_of(bucket: C10dBucket) -> tuple[PackedGrads, torch.Tensor]:
    layout = layout_reduce(bucket.layout)
    plan, out = ReducePlan.of(bucket, layout), torch.empty(layout.chunk_numel)
    return PackedGrads(bucket, plan, out, 1.0), out


def random_grads(bucket: C10dBucket) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(p.spec.shape) for p in bucket.layout.params]


def packed(bucket: C10dBucket, grads: list[torch.Tensor]) -> torch.Tensor:
    buffer, _ = grads_of(bucket)
    for index, grad in enumerate(grads):
        buffer.put(index, grad)
    staging = buffer.finish()
    result = staging.packed.clone()
    staging.give_back()
    return result


@pytest.mark.parametrize("kind", ["gather", "reduce"])
def test_staging_costs_no_memory_between_uses_and_is_used_again(kind: str) -> None:
    bucket = bucket_of((8, 3), (4,))
    out = torch.empty(bucket.layout.full_numel)

    def take() -> GatherStaging | ReduceStaging:
        if kind == "gather":
            return GatherStaging.take(bucket, GatherPlan.of(bucket), out, None)
        plan = ReducePlan.of(bucket, layout_reduce(bucket.layout))
        return ReduceStaging.take(bucket, plan, out, None)

    def end(staging: GatherStaging | ReduceStaging) -> None:
        if isinstance(staging, GatherStaging):
            staging.unpack()
        else:
            staging.give_back()

    if kind == "gather":
        end(take())  # kept from the second gather into the same buffer on
    first = take()
    size = first.packed.untyped_storage().nbytes()
    assert size
    second = take()
    assert second is not first, "one that is in use is left alone"
    end(first)
    end(second)
    assert not first.packed.untyped_storage().nbytes()
    assert not second.packed.untyped_storage().nbytes()
    again = take()
    assert again is second
    assert again.packed.untyped_storage().nbytes() == size


def test_a_gathered_buffer_that_is_given_up_is_not_kept_alive() -> None:
    bucket = bucket_of((8, 3), (4,))
    plan, numel = GatherPlan.of(bucket), bucket.layout.full_numel
    gone = []
    for _ in range(3):
        out = torch.empty(numel)
        GatherStaging.take(bucket, plan, out, None).unpack()
        gone.append(weakref.ref(out))
        del out
    assert all(ref() is None for ref in gone)
    assert bucket.gather_staging is None


@pytest.mark.parametrize(
    ("shapes", "dim"),
    [
        (((8, 3), (4,), (4, 2, 2)), 0),  # even: by one call
        (((6, 3), (4,)), 0),  # uneven
        (((3, 8), (2, 4)), 1),
    ],
)
def test_held_gradients_lie_as_if_each_had_been_copied_by_itself(
    shapes: tuple[tuple[int, ...], ...], dim: int
) -> None:
    bucket = bucket_of(*shapes, shard_dim=dim)
    grads = random_grads(bucket)
    together = packed(bucket, grads)
    scattered = [torch.stack([g, g], -1)[..., 0] for g in grads]  # with strides of their own
    assert not scattered[0].is_contiguous()
    assert torch.equal(packed(bucket, scattered), together)
    layout = layout_reduce(bucket.layout)
    chunks = together.view(WORLD, -1)
    assert torch.equal(chunks[:, layout.counts_offset :], torch.ones(WORLD, len(grads)))
    for rank in range(WORLD):
        for p, grad, at in zip(layout.params, grads, layout.offsets(rank), strict=True):
            part = grad.narrow(dim, p.cuts.start(rank), p.cuts.size(rank)).reshape(-1)
            assert torch.equal(chunks[rank, at : at + part.numel()], part)


def test_large_gradients_are_copied_at_once_and_small_ones_when_they_add_up() -> None:
    large, small = BATCHED_BYTES // 4 + 4, BATCHED_BYTES // 4 // 2
    bucket = bucket_of((large,), (small,), (small,), (small,))
    buffer, _ = grads_of(bucket)
    grads = random_grads(bucket)
    buffer.put(0, grads[0])
    assert not buffer._held
    buffer.put(1, grads[1])
    assert list(buffer._held) == [1]
    buffer.put(2, grads[2])
    buffer.put(3, grads[3])
    assert not buffer._held, "over the limit: none is kept"


def test_a_second_gradient_is_added_in_the_reductions_dtype() -> None:
    bucket = bucket_of((8, 3), (4,))
    buffer, _ = grads_of(bucket)
    for grad in (1.0, 2.0**-9):  # their sum is lost in bf16
        buffer.put(0, torch.full((8, 3), grad, dtype=torch.bfloat16))
        buffer.put(1, torch.full((4,), grad, dtype=torch.bfloat16))
    chunk = buffer.finish().packed.view(WORLD, -1)[0]
    assert torch.equal(chunk[:7], torch.full((7,), 1 + 2.0**-9))
