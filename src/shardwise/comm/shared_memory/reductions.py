"""The reductions: gradients over the shard axis, reduced shards over the replicate axis.

All sums are in rank order (sums.py), so all replicas get the same bits, and equal runs too.

All-reduces, measured on 2 cores (28 MiB | 4 KiB, ms): 2 ranks whole 8.9 | 0.1, by pieces 9.7 | 0.3;
4 ranks whole 26 | 0.1, by pieces 20 | 0.6. Pieces read less, and wait for the peers once more.
"""

from __future__ import annotations

import torch

from shardwise.comm.shared_memory.control import REPLICATE, SHARD
from shardwise.comm.shared_memory.gather import SharedBucket
from shardwise.comm.shared_memory.grads import OutgoingGrads
from shardwise.comm.shared_memory.mailbox import Exchange, Mailbox
from shardwise.comm.shared_memory.pieces import SumByPieces
from shardwise.comm.shared_memory.slots import SlotView
from shardwise.comm.shared_memory.sums import sum_of_ranks

_PIECES_FROM_BYTES = 4 << 20


class ShardSum(Exchange):
    """Each rank's parts of all gradients, summed by their owner."""

    def __init__(
        self,
        mailbox: Mailbox,
        bucket: SharedBucket,
        grads: OutgoingGrads,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        super().__init__(mailbox, bucket, SHARD, bucket.shard, grads.plan.members)
        self._plan, self._present = grads.plan, list(grads.present)
        self._out, self._scale = out, scale
        mailbox.post(self, grads.open_slot(), grads.wire, grads.present, grads.plan.part_numel)

    def advance(self) -> bool:
        if not self.all_posted():
            return False
        plan = self._plan
        slots = self.slots()
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
        sum_of_ranks(self._out[offset : offset + numel], self.rank, parts, self._scale)

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

    def __init__(self, mailbox: Mailbox, bucket: SharedBucket, out: torch.Tensor) -> None:
        super().__init__(mailbox, bucket, REPLICATE, bucket.replicate, bucket.members)
        self._out = out
        slot = mailbox.pool.acquire(self, 0, out.numel() * out.itemsize)
        with torch.no_grad():
            self._payload(slot).copy_(out)
        mailbox.post(self, slot, out.dtype, [], out.numel())

    def advance(self) -> bool:
        if not self.all_posted():
            return False
        slots = self.slots()
        with torch.no_grad():
            sum_of_ranks(self._out, self.rank, {r: self._payload(s) for r, s in slots.items()})
        self.acknowledge(slots)
        return True

    def _payload(self, slot: SlotView) -> torch.Tensor:
        return slot.payload(0, 0, self._out.numel(), self._out.dtype)


class ReplicaSumByPieces(SumByPieces):
    """The same with one piece for each rank."""

    def __init__(self, mailbox: Mailbox, bucket: SharedBucket, out: torch.Tensor) -> None:
        super().__init__(mailbox, bucket, out.numel())
        self._result = out
        self._slot = mailbox.pool.acquire(self, 0, out.numel() * out.itemsize)
        self.post_foreign([out])

    def sum_own(self, start: int, stop: int) -> None:
        parts = {r: self.row(slot, 0, start, stop) for r, slot in self._slots.items()}
        sum_of_ranks(self._result[start:stop], self.rank, parts)


def sum_over_replicas(mailbox: Mailbox, bucket: SharedBucket, out: torch.Tensor) -> Exchange:
    """The faster of both kinds; all replicas choose alike, since they hold the same layout."""
    by_pieces = bucket.replicate.size > 2 and out.numel() * out.itemsize > _PIECES_FROM_BYTES
    return (ReplicaSumByPieces if by_pieces else ReplicaSum)(mailbox, bucket, out)
