"""Moves: all ranks of a gather and of a reduction played with plain tensors, for every layout."""

import pytest
import torch
from hypothesis import given

from layouts import buckets, fill_shard, gathered, random_whole, rows_of
from shardwise.layout import (
    BucketLayout,
    Cuts,
    ParamSpec,
    layout_bucket,
    layout_reduce,
    pack_grads,
    pack_shards,
)

BOTH = pytest.mark.parametrize("padded", [True, False], ids=["padded", "exact"])


def shards_end_to_end(
    layout: BucketLayout, whole: list[torch.Tensor], *, padded: bool
) -> torch.Tensor:
    """What an all-gather leaves behind."""
    parts = []
    for rank in range(layout.world):
        shard = torch.zeros(layout.chunk_numel, dtype=layout.dtype)
        fill_shard(shard, layout, whole, rank)
        parts.append(shard if padded else shard[: layout.shard_numel(rank)])
    return torch.cat(parts)


@BOTH
@given(layout=buckets())
def test_gathers_reproduce_the_whole_parameters(layout: BucketLayout, padded: bool) -> None:
    whole = random_whole(layout, seed=1)
    packing = pack_shards(layout, padded=padded)
    packed = shards_end_to_end(layout, whole, padded=padded)
    assert packing.numel == packed.numel()
    out = torch.zeros(layout.full_numel, dtype=layout.dtype)
    for param, moves in zip(layout.params, packing.moves, strict=True):
        for move in moves:
            move.whole(out, param.full_offset).copy_(move.packed(packed))
    for expected, found in zip(whole, gathered(out, layout), strict=True):
        assert torch.equal(expected, found)


@BOTH
@given(layout=buckets())
def test_reductions_send_each_rank_its_rows(layout: BucketLayout, padded: bool) -> None:
    reduce = layout_reduce(layout)
    packing = pack_grads(reduce, padded=padded)
    if padded == reduce.sends_padded:
        assert packing.numel == reduce.packed_numel
    packed = torch.full((packing.numel,), 99.0)
    grads = [torch.randn(p.spec.shape) for p in reduce.params]
    for grad, moves in zip(grads, packing.moves, strict=True):
        for move in moves:
            move.packed(packed).copy_(move.whole(grad))
    for rank in range(layout.world):
        chunk = packing.chunk(packed, rank)
        written = torch.zeros(chunk.numel(), dtype=torch.bool)
        for grad, param, at in zip(grads, reduce.params, reduce.offsets(rank), strict=True):
            part = chunk[at : at + param.shard_numel(rank)]
            assert torch.equal(part, rows_of(grad, param, rank).reshape(-1))
            written[at : at + part.numel()] = True
        assert torch.equal(chunk[~written], torch.full((int((~written).sum()),), 99.0))


@given(layout=buckets())
def test_only_trainable_elements_are_reduced(layout: BucketLayout) -> None:
    reduce = layout_reduce(layout)
    trainable = [p for p in layout.params if p.spec.requires_grad]
    assert list(reduce.params) == trainable
    assert sum(reduce.data_numel(r) for r in range(layout.world)) == sum(p.numel for p in trainable)
    assert reduce.chunk_numel == reduce.counts_offset + len(trainable)
    assert reduce.chunk_bytes % 16 == 0, "what collectives on accelerators move fastest"
    assert 0 <= (reduce.counts_offset - reduce.largest_numel) * reduce.dtype.itemsize < 16
    frozen = layout_reduce(layout, (False,) * len(layout.params))
    assert frozen.chunk_numel == frozen.packed_numel == 0


@pytest.mark.parametrize("world", [1, 2, 17, 1024])
def test_equal_parts_move_in_one_copy_per_parameter(world: int) -> None:
    specs = [
        ParamSpec("w", (2 * world, 3), torch.float32),
        ParamSpec("columns", (5, world), torch.float32, shard_dim=1),
        ParamSpec("b", (world,), torch.float32),
        ParamSpec("empty", (0, 4), torch.float32),
    ]
    layout = layout_bucket(
        specs, gather_dtype=torch.float32, reduce_dtype=torch.float32, world=world
    )
    for packing in (
        pack_shards(layout, padded=True),
        pack_grads(layout_reduce(layout), padded=True),
    ):
        assert [len(moves) for moves in packing.moves] == [1, 1, 1, 0]


def test_uneven_parts_move_in_one_copy_per_run() -> None:
    spec = ParamSpec("w", (1000, 8), torch.float32)  # 16 rows on 62 ranks, 8 on one, 0 on one
    owned = ParamSpec("m", (8, 8), torch.float32, cuts=Cuts.whole(8, 64, 5))
    layout = layout_bucket(
        [spec, owned], gather_dtype=torch.float32, reduce_dtype=torch.float32, world=64
    )
    assert [len(moves) for moves in pack_shards(layout, padded=True).moves] == [2, 1]
