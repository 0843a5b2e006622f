"""A sum over replicas with one piece for each of them: a reduce-scatter and a gather in one slot.

Stage 1: each rank has posted the others' pieces; it sums its own and lays the total into the place
of that piece in its own slot. Stage 2: the others copy it from there.
"""

from __future__ import annotations

import torch

from shardwise.comm.shared_memory.control import REPLICATE
from shardwise.comm.shared_memory.gather import SharedBucket
from shardwise.comm.shared_memory.mailbox import Exchange, Mailbox
from shardwise.comm.shared_memory.slots import Slot, SlotView

_PIECE_ALIGN = 16


class SumByPieces(Exchange):
    """What sums over replicas share that differ in the order of their additions."""

    _slot: Slot  # this rank's, posted by the constructor of a subclass
    _result: torch.Tensor

    def __init__(self, mailbox: Mailbox, bucket: SharedBucket, numel: int) -> None:
        super().__init__(mailbox, bucket, REPLICATE, bucket.replicate, bucket.members)
        size = bucket.replicate.size
        self._numel = numel
        self._piece = -(-numel // (size * _PIECE_ALIGN)) * _PIECE_ALIGN
        self._slots: dict[int, SlotView] = {}

    def sum_own(self, start: int, stop: int) -> None:
        """The sum of this rank's piece, into the result."""
        raise NotImplementedError(f"{type(self).__name__} sums in the order of its subclass")

    def lacks(self, index: int) -> bool:
        if not self._slots:
            return super().lacks(index)
        return any(self.indices[r] == index and slot.stage < 2 for r, slot in self._slots.items())

    def advance(self) -> bool:
        with torch.no_grad():
            if not self._slots:
                if not self.all_posted():
                    return False
                self._slots = self.slots()
                self._show_own_piece()
            if any(slot.stage < 2 for slot in self._slots.values()):
                return False
            self.mailbox.domain.order()
            for r, slot in self._slots.items():
                start, stop = self.span(r)
                self._result[start:stop].copy_(self.row(slot, 0, start, stop))
        self.acknowledge(self._slots)
        return True

    def _show_own_piece(self) -> None:
        start, stop = self.span(self.rank)
        self.sum_own(start, stop)
        self.row(self._slot, 0, start, stop).copy_(self._result[start:stop])
        self.mailbox.domain.order()
        self._slot.stage = 2
        self.mailbox.domain.doorbell.ring()

    def post_foreign(self, rows: list[torch.Tensor]) -> None:
        """Show the others' pieces of what this rank adds, one or several rows of it."""
        start, stop = self.span(self.rank)
        with torch.no_grad():
            for k, row in enumerate(rows):
                for a, b in ((0, start), (stop, self._numel)):
                    self.row(self._slot, k, a, b).copy_(row[a:b])
        self.mailbox.post(self, self._slot, self._result.dtype, [], self._numel)

    def row(self, slot: SlotView, k: int, start: int, stop: int) -> torch.Tensor:
        return slot.payload(0, k * self._numel + start, stop - start, self._result.dtype)

    def span(self, rank: int) -> tuple[int, int]:
        """Where a rank's piece lies."""
        return min(rank * self._piece, self._numel), min((rank + 1) * self._piece, self._numel)
