"""The model of the caching allocator: its rules one by one, and what holds whatever is asked."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KIB, MIB = 2**10, 2**20


@pytest.fixture(scope="module")
def model() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import caching_allocator

        yield caching_allocator


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # the rest is below 1 MiB: given away with it
        (21 * MIB, 22 * MIB, 22 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(model: Any, size: int, block: int, segment: int) -> None:
    allocator = model.CachingAllocator()
    found = allocator.malloc(size, "compute")
    assert (found.size, found.segment.size) == (block, segment)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (size, block)
    assert allocator.reserved_bytes == segment


def test_the_rest_of_a_block_is_used(model: Any) -> None:
    allocator = model.CachingAllocator()
    blocks = [allocator.malloc(4 * MIB, "compute") for _ in range(5)]
    assert [b.address - blocks[0].address for b in blocks] == [i * 4 * MIB for i in range(5)]
    assert allocator.reserved_bytes == 20 * MIB
    allocator.malloc(4 * MIB, "compute")
    assert allocator.reserved_bytes == 40 * MIB


def test_a_rest_of_a_large_block_up_to_1_mib_is_given_away(model: Any) -> None:
    allocator = model.CachingAllocator()
    kept = [allocator.malloc(9 * MIB, "compute"), allocator.malloc(10 * MIB, "compute")]
    assert [b.size for b in kept] == [9 * MIB, 11 * MIB]


def test_pools_do_not_mix(model: Any) -> None:
    """Small requests find no place in large segments, and streams none in each other's."""
    allocator = model.CachingAllocator()
    allocator.free(allocator.malloc(8 * MIB, "compute"))
    allocator.malloc(512, "compute")
    assert allocator.reserved_bytes == 22 * MIB
    allocator.malloc(8 * MIB, "gather")
    assert allocator.reserved_bytes == 42 * MIB
    assert allocator.reserved_by() == {"compute": 22 * MIB, "gather": 20 * MIB}


def test_the_smallest_block_that_fits_is_taken(model: Any) -> None:
    allocator = model.CachingAllocator()
    large, _, middle, _ = (allocator.malloc(n * MIB, "s") for n in (8, 2, 4, 2))
    _, other = allocator.malloc(16 * MIB, "s"), allocator.malloc(4 * MIB, "s")
    for block in (large, other, middle):
        allocator.free(block)
    assert allocator.malloc(3 * MIB, "s") is middle  # rest of exactly 1 MiB: not split
    assert middle.size == 4 * MIB


def test_neighbours_join_when_freed(model: Any) -> None:
    allocator = model.CachingAllocator()
    first, second, third = (allocator.malloc(5 * MIB, "s") for _ in range(3))
    allocator.free(first)
    allocator.free(third)  # joins the rest
    assert [b.size for b in first.segment.blocks()] == [5 * MIB, 5 * MIB, 10 * MIB]
    allocator.free(second)
    assert [b.size for b in first.segment.blocks()] == [20 * MIB]
    allocator.malloc(18 * MIB, "s")
    assert allocator.reserved_bytes == 20 * MIB


@pytest.mark.parametrize("events", ["at once", "at sync"])
def test_a_block_that_another_stream_uses_comes_back_later(model: Any, events: str) -> None:
    allocator = model.CachingAllocator(model.EventsPass(events))
    block = allocator.malloc(12 * MIB, "gather")
    allocator.record_stream(block, "gather")  # its own: nothing to wait for
    assert not block.users
    allocator.record_stream(block, "compute")
    allocator.free(block)
    assert (allocator.num_deferred, allocator.pending_bytes) == (1, 12 * MIB)
    assert allocator.allocated_bytes == 0
    is_same = allocator.malloc(12 * MIB, "gather") is block
    assert is_same == (events == "at once")
    allocator.synchronize()
    assert allocator.pending_bytes == 0
    again = allocator.malloc(12 * MIB, "gather")
    assert (again is block) == (events == "at sync") and not again.users


def test_a_block_is_freed_once(model: Any) -> None:
    allocator = model.CachingAllocator()
    block = allocator.malloc(1, "s")
    allocator.free(block)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(block)
    with pytest.raises(ValueError, match="above 0"):
        allocator.malloc(0, "s")


SIZES = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(MIB, 40 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 20 * MIB]),
)  # fmt: skip
STREAMS = st.sampled_from(["compute", "gather", "reduce"])
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, STREAMS),
        st.tuples(st.just("free"), st.integers(0, 99), STREAMS),
        st.tuples(st.just("record"), st.integers(0, 99), STREAMS),
        st.tuples(st.just("sync"), st.just(0), st.just("")),
    ),
    max_size=60,
)


def check(allocator: Any, live: list[tuple[Any, int, str]]) -> None:
    """Blocks cover their segments without a gap, no two free ones are neighbours, sums hold."""
    found = [block for segment in allocator.segments for block in segment.blocks()]
    for segment in allocator.segments:
        at = segment.address
        for block in segment.blocks():
            assert block.address == at and block.size >= 512 and block.segment is segment
            assert block.after is None or block.after.before is block
            assert not (block.is_free and block.after is not None and block.after.is_free)
            at = block.end
        assert at == segment.address + segment.size
    ends = sorted((s.address, s.address + s.size) for s in allocator.segments)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    held = [block for block in found if block.is_allocated]
    assert set(map(id, held)) == {id(block) for block, _, _ in live}
    for block, size, stream in live:
        assert block.size >= size == block.requested and block.segment.stream == stream
    assert allocator.requested_bytes == sum(size for _, size, _ in live)
    assert allocator.allocated_bytes == sum(block.size for block in held)
    assert allocator.pending_bytes == sum(b.size for b in found if b.is_pending)
    assert allocator.reserved_bytes == sum(s.size for s in allocator.segments)
    assert allocator.reserved_bytes >= sum(block.size for block in found if not block.is_free)
    assert allocator.reserved_peak >= allocator.allocated_peak >= allocator.allocated_bytes


@given(calls=CALLS, events=st.sampled_from(["at once", "at sync"]))
def test_whatever_is_asked_blocks_never_overlap_and_merge_again(
    model: Any, calls: list[tuple[str, int, str]], events: str
) -> None:
    allocator = model.CachingAllocator(model.EventsPass(events))
    live: list[tuple[Any, int, str]] = []
    for call, number, stream in calls:
        if call == "malloc":
            live.append((allocator.malloc(number, stream), number, stream))
        elif call == "sync":
            allocator.synchronize()
        elif live and call == "free":
            allocator.free(live.pop(number % len(live))[0])
        elif live:
            allocator.record_stream(live[number % len(live)][0], stream)
        check(allocator, live)
    for block, _, _ in live:
        allocator.free(block)
    allocator.synchronize()
    check(allocator, [])
    assert all(len(segment.blocks()) == 1 for segment in allocator.segments)
