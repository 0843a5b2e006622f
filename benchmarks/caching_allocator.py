"""A model of torch's caching allocator for accelerators: which blocks requests would get.

Pure Python, no device. What it follows, with `expandable_segments` off and no limit on splitting:

    a request         rounded up to 512 bytes                                               [1]
    up to 1 MiB       from the small pool, whose segments are 2 MiB                         [2]
    up to 10 MiB      from a segment of 20 MiB; beyond that one of its own, in steps of 2 MiB
    each stream       has blocks of its own; what is free on one is of no use to another    [2]
    which block       the smallest that is large enough; of those the lowest address        [2]
    the rest of it    stays as a free block: in the small pool from 512 bytes on, in the
                      large pool when it is more than 1 MiB; else it is given away with it  [1]
    freed             a block joins free neighbours of its segment
    `record_stream`   a block that other streams use comes back when their events, recorded at
                      its free, have passed; this is looked at in each request              [3]

[1] c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of torch: `round_size`,
`get_allocation_size`, `should_split` and the constants beside them. [2] The comment at the head of
the former. [3] https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html

Left out: cached segments go back to the driver only where memory runs out, and here it never does;
private pools of graphs; what does not come from this allocator (NCCL's buffers, cuBLAS' context).
When an event passes depends on the device, so both ends are offered: `EventsPass.AT_ONCE`, the
device keeps up with the host, and `AT_SYNC`, the host runs ahead until it synchronises.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from enum import StrEnum

KIB, MIB = 2**10, 2**20
SMALLEST_BLOCK = 512
LARGEST_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
SMALLEST_OWN_SEGMENT = 10 * MIB
OWN_SEGMENT_STEP = 2 * MIB


class EventsPass(StrEnum):
    """When the events of `record_stream` are over."""

    AT_ONCE = "at once"
    AT_SYNC = "at sync"


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment. `requested` is what the caller asked for; 0 when it is free."""

    segment: Segment
    address: int
    size: int
    requested: int = 0
    is_allocated: bool = False
    is_pending: bool = False  # freed, while other streams may still use it
    users: set[str] = field(default_factory=set)
    before: Block | None = None
    after: Block | None = None

    @property
    def is_free(self) -> bool:
        return not (self.is_allocated or self.is_pending)

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(eq=False, slots=True)
class Segment:
    """What one call of the driver's malloc returned; `first` is the block at its beginning."""

    address: int
    size: int
    stream: str
    is_small: bool
    first: Block | None = None

    def blocks(self) -> list[Block]:
        found, block = [], self.first
        while block is not None:
            found.append(block)
            block = block.after
        return found


class CachingAllocator:
    """Requests and frees, in the order in which the host makes them. Streams are names."""

    def __init__(self, events: EventsPass = EventsPass.AT_SYNC) -> None:
        self.events = events
        self.segments: list[Segment] = []
        self.requested_bytes = self.allocated_bytes = self.reserved_bytes = self.pending_bytes = 0
        self.requested_peak = self.allocated_peak = self.reserved_peak = 0
        self.num_deferred = 0  # frees that had to wait for other streams
        self._end = LARGE_SEGMENT  # of the addresses that were given out
        # (small or large, stream) -> (size, address) of its free blocks, smallest first
        self._free: dict[tuple[bool, str], list[tuple[int, int]]] = {}
        self._blocks: dict[int, Block] = {}  # by address
        self._pending: list[Block] = []

    def malloc(self, size: int, stream: str) -> Block:
        """`size` in bytes, above 0; torch answers requests for nothing without a block."""
        if size <= 0:
            raise ValueError(f"malloc: expected a size above 0, found {size}")
        if self.events is EventsPass.AT_ONCE:
            self.synchronize()
        needed = rounded(size)
        is_small = needed <= LARGEST_SMALL
        block = self._best(is_small, stream, needed) or self._new_segment(is_small, stream, needed)
        self._split(block, needed)
        block.is_allocated, block.requested = True, size
        self.requested_bytes += size
        self.allocated_bytes += block.size
        self.requested_peak = max(self.requested_peak, self.requested_bytes)
        self.allocated_peak = max(self.allocated_peak, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        assert block.is_allocated, f"the block at {block.address} is freed twice"
        block.is_allocated = False
        self.requested_bytes -= block.requested
        self.allocated_bytes -= block.size
        block.requested = 0
        if block.users:
            block.is_pending = True
            self.num_deferred += 1
            self.pending_bytes += block.size
            self._pending.append(block)
        else:
            self._give_back(block)

    def record_stream(self, block: Block, stream: str) -> None:
        """Another stream uses the block: it comes back when that stream has passed its free."""
        if stream != block.segment.stream:
            block.users.add(stream)

    def synchronize(self) -> None:
        """All streams have done what they were given."""
        pending, self._pending = self._pending, []
        for block in pending:
            block.is_pending = False
            block.users.clear()
            self.pending_bytes -= block.size
            self._give_back(block)

    def reset_peaks(self) -> None:
        self.requested_peak, self.allocated_peak = self.requested_bytes, self.allocated_bytes
        self.reserved_peak = self.reserved_bytes

    def reserved_by(self) -> dict[str, int]:
        """Bytes of segments, by stream."""
        found: dict[str, int] = {}
        for segment in self.segments:
            found[segment.stream] = found.get(segment.stream, 0) + segment.size
        return found

    # -- blocks ----------------------------------------------------------------------------------
    def _best(self, is_small: bool, stream: str, size: int) -> Block | None:
        free = self._free.get((is_small, stream), [])
        at = bisect.bisect_left(free, (size, 0))
        return self._blocks[free.pop(at)[1]] if at < len(free) else None

    def _new_segment(self, is_small: bool, stream: str, size: int) -> Block:
        segment = Segment(self._end, segment_bytes(size), stream, is_small)
        block = segment.first = Block(segment, segment.address, segment.size)
        self._end += segment.size + LARGE_SEGMENT  # never neighbours
        self._blocks[block.address] = block
        self.segments.append(segment)
        self.reserved_bytes += segment.size
        self.reserved_peak = max(self.reserved_peak, self.reserved_bytes)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        if rest < SMALLEST_BLOCK if block.segment.is_small else rest <= LARGEST_SMALL:
            return
        other = Block(block.segment, block.address + size, rest, before=block, after=block.after)
        if block.after is not None:
            block.after.before = other
        block.after, block.size = other, size
        self._blocks[other.address] = other
        self._add(other)

    def _give_back(self, block: Block) -> None:
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                self._join(*sorted((block, other), key=lambda b: b.address))
                block = block if block.address < other.address else other
        self._add(block)

    def _join(self, low: Block, high: Block) -> None:
        low.size += high.size
        low.after = high.after
        if high.after is not None:
            high.after.before = low
        del self._blocks[high.address]

    def _pool(self, block: Block) -> list[tuple[int, int]]:
        return self._free.setdefault((block.segment.is_small, block.segment.stream), [])

    def _add(self, block: Block) -> None:
        bisect.insort(self._pool(block), (block.size, block.address))

    def _remove(self, block: Block) -> None:
        pool = self._pool(block)
        del pool[bisect.bisect_left(pool, (block.size, block.address))]


def rounded(size: int) -> int:
    """What a request for `size` bytes needs of a block."""
    return max(SMALLEST_BLOCK, -(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK)


def segment_bytes(size: int) -> int:
    """Of a new segment for a block of `size` bytes."""
    if size <= LARGEST_SMALL:
        return SMALL_SEGMENT
    if size < SMALLEST_OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // OWN_SEGMENT_STEP) * OWN_SEGMENT_STEP
