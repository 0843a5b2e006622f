"""How the state of parameters is cut into chunks of bounded size.

    chunk    [ header | slot 0: piece a, piece b, ... | slot 1: piece a, piece b, ... ]
    pieces   a run of elements of this rank's part of a parameter; a large one has several, in
             chunks that follow each other, small ones share a chunk

A chunk holds parameters of one unit only, so that units which step one by one read and write each
chunk once. All its pieces have the same slots. Pieces begin at multiples of `ALIGN` elements, both
of the parameter and of the chunk: a kernel's vectors then begin where they begin in the whole, and
what it does to the last few elements, it does to the last few of the parameter only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PAGE = 4096
ALIGN = 1024  # elements; every vector of every kernel divides it
MASTER = "master_weight"


@dataclass(frozen=True, slots=True)
class Slot:
    """One value of the state for each element of a parameter."""

    name: str
    dtype: torch.dtype


@dataclass(eq=False, slots=True)
class Entry:
    """A parameter, and what is kept of it beside the slots."""

    parameter: Tensor
    name: str
    numel: int  # of this rank's part
    slots: tuple[Slot, ...]
    unit: object
    scalars: dict[str, Any] = field(default_factory=dict)  # step counts and the like
    has_state: bool = False
    lacks_master: bool = False  # state came without the master weights, which the shard gives
    chunks: list[Chunk] = field(default_factory=list)

    def slot(self, name: str) -> Slot | None:
        return next((s for s in self.slots if s.name == name), None)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of a parameter, which lie from `at` on in each slot."""

    entry: Entry
    start: int
    stop: int
    at: int


@dataclass(eq=False, slots=True)
class Chunk:
    """What is read, stepped and written together."""

    index: int
    slots: tuple[Slot, ...]
    pieces: list[Piece] = field(default_factory=list)
    numel: int = 0

    def section_bytes(self, slot: Slot) -> int:
        return -(-self.numel * slot.dtype.itemsize // PAGE) * PAGE

    def section_start(self, slot: Slot) -> int:
        before = self.slots[: self.slots.index(slot)]
        return PAGE + sum(map(self.section_bytes, before))

    @property
    def size_bytes(self) -> int:
        """With the header; 0 where there is nothing to keep."""
        return PAGE + sum(map(self.section_bytes, self.slots)) if self.slots else 0

    def views(self, memory: Tensor, piece: Piece) -> dict[str, Tensor]:
        """The slots of a piece, in memory that holds the chunk."""
        return {s.name: self.in_section(self.section_of(memory, s), s, piece) for s in self.slots}

    def section_of(self, memory: Tensor, slot: Slot) -> Tensor:
        start = self.section_start(slot)
        return memory[start : start + self.section_bytes(slot)]

    def in_section(self, section: Tensor, slot: Slot, piece: Piece) -> Tensor:
        return section.view(slot.dtype)[piece.at : piece.at + piece.stop - piece.start]

    def piece_of(self, entry: Entry) -> Piece:
        return next(p for p in self.pieces if p.entry is entry)


def batches(pieces: Iterable[Piece], numel: int) -> Iterator[list[Piece]]:
    """The same elements in smaller pieces, at most so many (a multiple of `ALIGN`) together."""
    batch, room = list[Piece](), numel
    for piece in pieces:
        start = piece.start
        while True:
            stop = min(start + room, piece.stop)
            batch.append(Piece(piece.entry, start, stop, piece.at + start - piece.start))
            room -= math.ceil((stop - start) / ALIGN) * ALIGN
            if room <= 0:
                yield batch
                batch, room = [], numel
            start = stop
            if start == piece.stop:
                break
    if batch:
        yield batch


def cut(entries: Iterable[Entry], chunk_bytes: int, first_index: int) -> list[Chunk]:
    """Chunks for these parameters, which get to know theirs."""
    units: dict[int, int] = {}
    kinds: dict[tuple[Slot, ...], int] = {}
    listed = list(entries)
    for entry in listed:
        units.setdefault(id(entry.unit), len(units))
        kinds.setdefault(entry.slots, len(kinds))
    listed.sort(key=lambda e: (units[id(e.unit)], kinds[e.slots]))
    chunks: list[Chunk] = []
    before: Entry | None = None
    for entry in listed:
        joins = before is not None and (before.unit is entry.unit and before.slots == entry.slots)
        _place(entry, chunks, _capacity(entry.slots, chunk_bytes), first_index, joins=joins)
        before = entry
    return chunks


def _capacity(slots: Sequence[Slot], chunk_bytes: int) -> int:
    """Elements of a chunk; at least as many as pieces are aligned to."""
    per_element = sum(s.dtype.itemsize for s in slots) or 4
    return max(1, chunk_bytes // per_element // ALIGN) * ALIGN


def _place(entry: Entry, chunks: list[Chunk], capacity: int, first: int, *, joins: bool) -> None:
    start = 0
    while True:
        room = capacity - chunks[-1].numel if joins else 0
        if room <= 0:
            chunks.append(Chunk(first + len(chunks), entry.slots))
            room, joins = capacity, True
        chunk, stop = chunks[-1], min(start + room, entry.numel)
        chunk.pieces.append(Piece(entry, start, stop, chunk.numel))
        chunk.numel += math.ceil((stop - start) / ALIGN) * ALIGN
        entry.chunks.append(chunk)
        start = stop
        if start == entry.numel:
            return
