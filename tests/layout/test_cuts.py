"""Cuts tile the rows exactly once, and even cuts are those of torch.chunk and DTensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from layouts import WORLDS, cuts_of
from shardwise.layout import Cuts


@st.composite
def any_cuts(draw: st.DrawFn) -> Cuts:
    return draw(cuts_of(draw(st.integers(0, 200)), draw(WORLDS)))


@given(any_cuts())
def test_cuts_tile_the_rows_exactly_once(cuts: Cuts) -> None:
    owned = [row for r in range(cuts.world) for row in range(cuts.start(r), cuts.stop(r))]
    assert owned == list(range(cuts.rows))
    assert sum(cuts.size(r) for r in range(cuts.world)) == cuts.rows
    assert cuts.is_exact == (len({cuts.size(r) for r in range(cuts.world)}) == 1)


@given(st.integers(0, 200), WORLDS)
def test_even_cuts_are_those_of_chunk(rows: int, world: int) -> None:
    cuts, parts = Cuts.even(rows, world), torch.arange(rows).chunk(world)
    for rank in range(world):
        expected = parts[rank].tolist() if rank < len(parts) else []
        assert list(range(cuts.start(rank), cuts.stop(rank))) == expected
    assert cuts.is_even


@given(st.integers(0, 200), WORLDS)
def test_even_cuts_are_those_of_dtensor(rows: int, world: int) -> None:
    cuts = Cuts.even(rows, world)
    shards, _ = Shard(0)._split_tensor(torch.arange(rows), world, with_padding=False)
    assert [cuts.size(r) for r in range(world)] == [shard.numel() for shard in shards]


@given(st.integers(0, 200), WORLDS, st.integers(1, 64))
def test_block_cuts_keep_blocks_whole(rows: int, world: int, block: int) -> None:
    cuts = Cuts.block(rows, world, block)
    assert all(bound % block == 0 or bound == rows for bound in cuts.bounds)
    blocks = -(-rows // block)
    assert max(cuts.size(r) for r in range(world)) <= -(-blocks // world) * block


@given(st.integers(0, 200), WORLDS, st.data())
def test_whole_cuts_have_one_owner(rows: int, world: int, data: st.DataObject) -> None:
    owner = data.draw(st.integers(0, world - 1))
    cuts = Cuts.whole(rows, world, owner)
    assert [cuts.size(r) for r in range(world)] == [rows if r == owner else 0 for r in range(world)]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Cuts((0,)), "one rank at least"),
        (lambda: Cuts((1, 2)), "start at 0"),
        (lambda: Cuts((0, 3, 2)), "must not go back"),
        (lambda: Cuts.even(-1, 2), "rows cannot be negative"),
        (lambda: Cuts.even(4, 0), "one rank at least"),
        (lambda: Cuts.block(4, 2, 0), "one row at least"),
        (lambda: Cuts.whole(4, 2, 2), "owner must be a rank"),
    ],
)
def test_impossible_cuts_are_refused(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()
