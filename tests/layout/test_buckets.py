"""Buckets: parts lie side by side, aligned, inside their buffers; bytes are real tensors'."""

import pytest
import torch
from hypothesis import given

from layouts import WORLDS, buckets, random_whole, rows_of
from shardwise.layout import ALIGN, BucketLayout, Cuts, ParamSpec, layout_bucket, layout_reduce
from shardwise.layout.bucket import SMALL

F32, BF16 = torch.float32, torch.bfloat16


def bucket_of(*specs: ParamSpec, world: int, gather_dtype: torch.dtype = F32) -> BucketLayout:
    return layout_bucket(specs, gather_dtype=gather_dtype, reduce_dtype=F32, world=world)


def assert_side_by_side(spans: list[tuple[int, int]], end: int) -> None:
    """Spans (start, numel) that hold anything do not overlap, are aligned and end in time."""
    at = 0
    for start, numel in spans:
        assert start % ALIGN == 0 or numel < SMALL
        assert start >= at
        at = start + numel
    assert at <= end


@given(buckets())
def test_shards_lie_side_by_side(layout: BucketLayout) -> None:
    for rank in range(layout.world):
        sizes = [p.shard_numel(rank) for p in layout.params]
        offsets = layout.shard_offsets(rank)
        assert_side_by_side(list(zip(offsets, sizes, strict=True)), layout.shard_numel(rank))
        assert layout.shard_numel(rank) <= layout.chunk_numel
    assert layout.chunk_numel in {layout.shard_numel(rank) for rank in range(layout.world)}


@given(buckets())
def test_full_parameters_lie_side_by_side(layout: BucketLayout) -> None:
    spans = [(p.full_offset, p.numel) for p in layout.params]
    assert_side_by_side(spans, layout.full_numel)
    assert layout.full_numel < sum(numel for _, numel in spans) + ALIGN * (len(spans) + 1)


@given(buckets())
def test_every_element_has_one_owner(layout: BucketLayout) -> None:
    for param in layout.params:
        parts = range(layout.world)
        assert sum(param.shard_numel(rank) for rank in parts) == param.numel
        numbered = torch.arange(param.numel).view(param.spec.shape)
        owned = [rows_of(numbered, param, rank) for rank in parts]
        assert [tuple(part.shape) for part in owned] == [param.shard_shape(r) for r in parts]
        everything = torch.cat([part.reshape(-1) for part in owned])
        assert torch.equal(everything.sort().values, torch.arange(param.numel))


@given(buckets())
def test_bytes_are_those_of_real_tensors(layout: BucketLayout) -> None:
    shard = torch.empty(layout.chunk_numel, dtype=layout.dtype)
    full = torch.empty(layout.full_numel, dtype=layout.gather_dtype)
    assert layout.shard_bytes == shard.untyped_storage().nbytes()
    assert layout.full_bytes == full.untyped_storage().nbytes()
    reduce = layout_reduce(layout)
    chunk = torch.empty(reduce.chunk_numel, dtype=layout.reduce_dtype)
    assert reduce.chunk_bytes == chunk.untyped_storage().nbytes()


@given(buckets())
def test_rank_major_buckets_are_their_shards_end_to_end(layout: BucketLayout) -> None:
    if not layout.is_rank_major:
        return
    whole = random_whole(layout, seed=0)
    shards = torch.zeros(layout.world, layout.chunk_numel, dtype=layout.dtype)
    full = torch.zeros(layout.full_numel, dtype=layout.dtype)
    for param, tensor in zip(layout.params, whole, strict=True):
        full[param.full_offset : param.full_offset + param.numel] = tensor.reshape(-1)
        for rank in range(layout.world):
            at = layout.shard_offsets(rank)[layout.params.index(param)]
            part = rows_of(tensor, param, rank).reshape(-1)
            shards[rank, at : at + part.numel()] = part
    assert torch.equal(full, shards.view(-1))


@given(WORLDS)
def test_scalars_belong_to_the_first_rank(world: int) -> None:
    (scalar,) = bucket_of(ParamSpec("s", (), F32), world=world).params
    assert [scalar.shard_numel(rank) for rank in range(world)] == [1] + [0] * (world - 1)
    assert scalar.shard_shape(0) == ()


def test_padding_is_sent_while_it_is_small_or_cheap() -> None:
    assert bucket_of(ParamSpec("bias", (7,), F32), world=1024).sends_padded
    assert bucket_of(ParamSpec("w", (1000, 1000), F32), world=7).sends_padded
    whole = ParamSpec("muon", (1024, 1024), F32, cuts=Cuts.whole(1024, 8, 3))
    assert not bucket_of(whole, world=8).sends_padded
    assert not layout_reduce(bucket_of(whole, world=8)).sends_padded
    owners = [ParamSpec(f"m{i}", (512, 512), F32, cuts=Cuts.whole(512, 8, i)) for i in range(8)]
    assert bucket_of(*owners, world=8).sends_padded


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="one stored dtype"):
        bucket_of(ParamSpec("a", (4,), F32), ParamSpec("b", (4,), BF16), world=2)
    with pytest.raises(ValueError, match=r"layers\.0\.w: shard dim 2 is outside the 2 dims"):
        bucket_of(ParamSpec("layers.0.w", (4, 4), F32, shard_dim=2), world=2)
    with pytest.raises(ValueError, match="w: cuts for 4 rows on 3 ranks do not fit 8 rows"):
        bucket_of(ParamSpec("w", (8, 4), F32, cuts=Cuts.even(4, 3)), world=3)
