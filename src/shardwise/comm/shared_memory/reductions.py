"""The reductions: gradients over the shard axis, reduced shards over the replicate axis.

All sums are in rank order (sums.py), so all replicas get the same bits, and equal runs too.

All-reduces, measured on 2 cores (28 MiB | 4 KiB, ms): 2 ranks whole 8.9 | 0.1, by pieces 9.7 | 0.3;
4 ranks whole 26 | 0.1, by pieces 20 | 0.6. Pieces read less, and wait for the peers once more.
"""

from __future__ import annotations

import torch

from shardwise.comm.shared_memory.control import REPLICATE, SHARD
from shardwise.comm.shared_memory.grads import OutgoingGrads
from shardwise.comm.shared_memory.mailbox import Exchange, Mailbox
from shardwise.comm.shared_memory.slots import SlotView
from shardwise.comm.shared_memory.sums import sum_in_order
from shardwise.comm.transport import Bucket

_PIECE_ALIGN = 16
_PIECES_FROM_BYTES = 4 << 20


class ShardSum(Exchange):
    """Each rank's parts of all gradients, summed by their owner."""

    def __init__(
        self,
        mailbox: Mailbox,
        bucket: Bucket,
        grads: OutgoingGrads,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        super().__init__(mailbox, bucket, SHARD, bucket.shard)
        self._plan, self._present = grads.plan, list(grads.present)
        self._out, self._scale = out, scale
        mailbox.post(self, grads.open_slot(), grads.wire, grads.present, grads.plan.part_numel)

    def advance(self) -> bool:
        if not self.all_posted():
            return False
        plan = self._plan
        num_params = len(plan.params)
        slots = self.slots(plan.part_numel, num_params)
        with torch.no_grad():
            if all(self._present) and all(slot.all_present for slot in slots.values()):
                self._sum(list(slots), slots, 0, plan.own_numel)
                counts = None
            else:
                counts = self._sum_present(slots)
            if plan.own_numel < plan.counts_offset:
                self._out[plan.own_numel : plan.counts_offset].zero_()
            tail = self._out[plan.counts_offset :]
            tail.fill_(len(slots) + 1) if counts is None else tail.copy_(torch.tensor(counts))
        self.acknowledge(slots)
        return True

    def _sum(self, ranks: list[int], slots: dict[int, SlotView], offset: int, numel: int) -> None:
        plan, num_params = self._plan, len(self._plan.params)
        parts = {
            r: slots[r].payload(
                num_params, plan.position(self.rank, r) + offset, numel, slots[r].dtype
            )
            for r in ranks
        }
        before = [part for r, part in parts.items() if r < self.rank]
        after = [part for r, part in parts.items() if r > self.rank]
        sum_in_order(self._out[offset : offset + numel], before, after, self._scale)

    def _sum_present(self, slots: dict[int, SlotView]) -> list[int]:
        """Parameter by parameter, from the ranks that have it:

        others' slots hold old data there.
        """
        num_params = len(self._plan.params)
        presence = {r: slot.presence(num_params) for r, slot in slots.items()}
        counts = []
        for i, (offset, numel) in enumerate(self._plan.own):
            ranks = [r for r in slots if presence[r][i]]
            if not self._present[i]:
                self._out[offset : offset + numel].zero_()
            self._sum(ranks, slots, offset, numel)
            counts.append(len(ranks) + self._present[i])
        return counts


class ReplicaSum(Exchange):
    """A flat tensor summed over the replicate axis, in place: each rank posts all of it."""

    def __init__(self, mailbox: Mailbox, bucket: Bucket, out: torch.Tensor) -> None:
        super().__init__(mailbox, bucket, REPLICATE, bucket.replicate)
        self._out = out
        self._slot = mailbox.pool.acquire(self, 0, out.numel() * out.itemsize)
        with torch.no_grad():
            for start, stop in self._foreign_spans():
                self._payload(self._slot, start, stop).copy_(out[start:stop])
        mailbox.post(self, self._slot, out.dtype, [], out.numel())

    def advance(self) -> bool:
        if not self.all_posted():
            return False
        slots = self.slots(self._out.numel(), 0)
        with torch.no_grad():
            self._sum(slots, 0, self._out.numel())
        self.acknowledge(slots)
        return True

    def _foreign_spans(self) -> list[tuple[int, int]]:
        """What peers read of this rank's post."""
        return [(0, self._out.numel())]

    def _sum(self, slots: dict[int, SlotView], start: int, stop: int) -> None:
        parts = {r: self._payload(slot, start, stop) for r, slot in slots.items()}
        sum_in_order(
            self._out[start:stop],
            [part for r, part in parts.items() if r < self.rank],
            [part for r, part in parts.items() if r > self.rank],
        )

    def _payload(self, slot: SlotView, start: int, stop: int) -> torch.Tensor:
        return slot.payload(0, start, stop - start, self._out.dtype)


class ReplicaSumByPieces(ReplicaSum):
    """The same with one piece for each rank, as a reduce-scatter and a gather in one slot.

    Stage 1: each rank has posted the others' pieces; it sums its own and lays the sum into the
    place of that piece in its own slot. Stage 2: the others copy it from there.
    """

    def __init__(self, mailbox: Mailbox, bucket: Bucket, out: torch.Tensor) -> None:
        size = bucket.replicate.size
        self._piece = -(-out.numel() // (size * _PIECE_ALIGN)) * _PIECE_ALIGN
        self._slots: dict[int, SlotView] = {}
        super().__init__(mailbox, bucket, out)

    def lacks(self, index: int) -> bool:
        if not self._slots:
            return super().lacks(index)
        return any(self.indices[r] == index and slot.stage < 2 for r, slot in self._slots.items())

    def advance(self) -> bool:
        with torch.no_grad():
            if not self._slots:
                if not self.all_posted():
                    return False
                self._slots = self.slots(self._out.numel(), 0)
                self._show_own_piece()
            if any(slot.stage < 2 for slot in self._slots.values()):
                return False
            self.mailbox.domain.order()
            for r, slot in self._slots.items():
                start, stop = self._span(r)
                self._out[start:stop].copy_(self._payload(slot, start, stop))
        self.acknowledge(self._slots)
        return True

    def _show_own_piece(self) -> None:
        start, stop = self._span(self.rank)
        self._sum(self._slots, start, stop)
        self._payload(self._slot, start, stop).copy_(self._out[start:stop])
        self.mailbox.domain.order()
        self._slot.stage = 2
        self.mailbox.domain.doorbell.ring()

    def _foreign_spans(self) -> list[tuple[int, int]]:
        start, stop = self._span(self.rank)
        return [(0, start), (stop, self._out.numel())]

    def _span(self, rank: int) -> tuple[int, int]:
        numel = self._out.numel()
        return min(rank * self._piece, numel), min((rank + 1) * self._piece, numel)


def sum_over_replicas(mailbox: Mailbox, bucket: Bucket, out: torch.Tensor) -> ReplicaSum:
    """The faster of both kinds; all replicas choose alike, since they hold the same layout."""
    by_pieces = bucket.replicate.size > 2 and out.numel() * out.itemsize > _PIECES_FROM_BYTES
    return (ReplicaSumByPieces if by_pieces else ReplicaSum)(mailbox, bucket, out)
