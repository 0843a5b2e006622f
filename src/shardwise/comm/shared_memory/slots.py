"""Mailbox slots: where a rank lays out what it sends, and the pool that they come from.

    slot   byte 0     ticket, stage, dtype code, all present, numel of a part, hash of the members,
                      tag, offset of the slot of the post before (same bucket and axis; 0: none)
           64 * (1+i) read by rank index i: the ticket that it has read; one writer, one cache line
                      each
           ...        presence of each parameter, one byte each
           ...        payload

A ticket is this rank's running count of posts. A slot is free again when every reader has written
its ticket back; the pool then hands it out again, on pages that are warm. It grows only when it has
to; `mailbox` says when that is, and why nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.comm.shared_memory.arena import Arena, Mapping
from shardwise.comm.shared_memory.control import Word

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LINE = 64


def presence_at(num_ranks: int) -> int:
    return _LINE * (1 + num_ranks)


def payload_at(num_ranks: int, num_params: int) -> int:
    return presence_at(num_ranks) + -(-num_params // _LINE) * _LINE


class SlotView:
    """A slot in any rank's arena, for its owner and for its readers."""

    __slots__ = ("_at", "_mapping", "_num_ranks", "_words", "offset")
    ticket = Word(0)
    stage = Word(1)
    all_present = Word(3)
    tag = Word(6)
    before = Word(7)

    def __init__(self, mapping: Mapping, offset: int, num_ranks: int) -> None:
        self._mapping, self._words = mapping, mapping.words
        self._at = offset // 8
        self._num_ranks = num_ranks
        self.offset = offset

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self._words[self._at + 2]]

    @property
    def identity(self) -> tuple[int, int]:
        """(numel of a part, hash of the members): equal on all ranks, or they have diverged."""
        return self._words[self._at + 4], self._words[self._at + 5]

    def describe(
        self,
        ticket: int,
        dtype: torch.dtype,
        present: Sequence[bool],
        identity: tuple[int, int],
    ) -> None:
        words, at = self._words, self._at
        self.ticket, self.stage, self.all_present = ticket, 1, all(present)
        words[at + 2] = DTYPES.index(dtype)
        words[at + 4], words[at + 5] = identity
        start = self.offset + presence_at(self._num_ranks)
        self._mapping.bytes[start : start + len(present)] = bytes(present)

    def presence(self, num_params: int) -> list[bool]:
        start = self.offset + presence_at(self._num_ranks)
        return [bool(x) for x in self._mapping.bytes[start : start + num_params]]

    def payload(self, num_params: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements `[start, start + numel)` of the payload, seen as `dtype`."""
        at = self.offset + payload_at(self._num_ranks, num_params) + start * dtype.itemsize
        return self._mapping.tensor(at, numel, dtype)

    def acknowledge(self, reader: int, ticket: int) -> None:
        self._words[self._at + 8 * (1 + reader)] = ticket

    def read_by(self, reader: int) -> int:
        return self._words[self._at + 8 * (1 + reader)]


class Slot(SlotView):
    """A slot of this rank's own pool. States: free, open (being filled), posted."""

    __slots__ = ("capacity_bytes", "holder", "posted_ticket", "readers", "touched_bytes")

    def __init__(self, arena: Arena, offset: int, num_ranks: int, capacity_bytes: int) -> None:
        super().__init__(arena, offset, num_ranks)
        self.capacity_bytes = capacity_bytes
        self.touched_bytes = 0  # so many have pages
        self.holder: object | None = None  # who fills it
        self.posted_ticket = 0
        self.readers: tuple[int, ...] = ()

    def posted_to(self, ticket: int, readers: tuple[int, ...]) -> None:
        self.holder, self.posted_ticket, self.readers = None, ticket, readers

    @property
    def unread(self) -> list[int]:
        """Readers that have not read the last post."""
        return [r for r in self.readers if self.read_by(r) != self.posted_ticket]

    @property
    def is_free(self) -> bool:
        return self.holder is None and not self.unread

    def free(self) -> None:
        self.holder, self.readers = None, ()


class SlotPool:
    """Few slots, reused.

    `wait(ready, lacks, stuck)` is the domain's wait, with progress made inside.
    """

    def __init__(
        self,
        arena: Arena,
        num_ranks: int,
        wait: Callable[[Callable[[], bool], Callable[[int], bool], Callable[[], bool]], None],
        num_slots: int = 3,
    ) -> None:
        self._arena, self._num_ranks, self._wait = arena, num_ranks, wait
        self._num_slots = num_slots
        self._largest_bytes = 0
        self.slots: list[Slot] = []

    def acquire(self, holder: object, num_params: int, payload_bytes: int) -> Slot:
        """A free slot of at least this size, held by `holder`.

        Waits for readers. Grows when nothing else can help: below the intended number, when all
        slots are being filled, or when all ranks wait for each other.
        """
        size = payload_at(self._num_ranks, num_params) + payload_bytes
        self._largest_bytes = max(self._largest_bytes, size)
        slot = self._take(size)
        if slot is None and not self._may_come_back():
            slot = self._grow()
        if slot is None:
            found: list[Slot] = []
            self._wait(
                lambda: self._take_into(found, size),
                lambda i: any(i in slot.unread for slot in self.slots),
                lambda: found.append(self._grow()) or True,
            )
            slot = found[0]
        slot.holder = holder
        slot.touched_bytes = max(slot.touched_bytes, size)
        return slot

    def free_all(self) -> None:
        """At the start of a phase, when all ranks have left the one before."""
        for slot in self.slots:
            slot.free()

    def _may_come_back(self) -> bool:
        return len(self.slots) >= self._num_slots and any(s.holder is None for s in self.slots)

    def _take_into(self, found: list[Slot], size: int) -> bool:
        slot = self._take(size)
        if slot is not None:
            found.append(slot)
        return slot is not None

    def _take(self, size: int) -> Slot | None:
        free = [slot for slot in self.slots if slot.is_free]
        if not free:
            return None
        large = [slot for slot in free if slot.capacity_bytes >= size]
        if large:
            # The smallest warm one that fits, else the one that lacks the fewest pages.
            warm = [slot for slot in large if slot.touched_bytes >= size]
            if warm:
                return min(warm, key=lambda slot: slot.touched_bytes)
            return max(large, key=lambda slot: slot.touched_bytes)
        # Too small: one that is as large as the largest reduction so far takes its place.
        self.slots.remove(free[0])
        self._arena.release(free[0].offset, free[0].capacity_bytes)
        return self._grow()

    def _grow(self) -> Slot:
        offset = self._arena.allocate(self._largest_bytes)
        slot = Slot(self._arena, offset, self._num_ranks, self._largest_bytes)
        self.slots.append(slot)
        return slot
