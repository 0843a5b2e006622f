"""Sums in tree order through mailboxes: leaves are read where the peers have posted them.

    TreeLeaves    each rank's parts of all gradients become leaves of their owner's tree
    ReplicaTree   replicas post the nodes that they hold, cut into one piece per replica; each sums
                  its own piece, lays the total into its slot, and reads the others' totals

The stages are those of `reductions.py`; only the order of the additions differs.
"""

from __future__ import annotations

import torch

from shardwise.comm.shared_memory.control import REPLICATE, SHARD
from shardwise.comm.shared_memory.grads import OutgoingGrads
from shardwise.comm.shared_memory.mailbox import Exchange, Mailbox
from shardwise.comm.shared_memory.slots import SlotView
from shardwise.comm.transport import Bucket
from shardwise.comm.tree_sum import TreeSum, fold_pieces

_PIECE_ALIGN = 16


class TreeLeaves(Exchange):
    """One round: rank r of the shard axis brings leaf `leaves[r]`, or nothing that counts."""

    def __init__(
        self,
        mailbox: Mailbox,
        bucket: Bucket,
        grads: OutgoingGrads,
        out: torch.Tensor,
        tree: TreeSum,
        leaves: tuple[int | None, ...],
    ) -> None:
        super().__init__(mailbox, bucket, SHARD, bucket.shard)
        self._grads, self._out, self._tree, self._leaves = grads, out, tree, leaves
        mailbox.post(self, grads.open_slot(), grads.wire, grads.present, grads.plan.part_numel)

    def advance(self) -> bool:
        if not self.all_posted():
            return False
        plan = self._grads.plan
        slots = self.slots(plan.part_numel, len(plan.params))
        with torch.no_grad():
            for r, leaf in enumerate(self._leaves):
                if leaf is None:
                    continue
                if r == self.rank:
                    self._tree.put_chunk(leaf, finished_chunk(self._grads, self._out))
                else:
                    self._put_peer(leaf, r, slots[r])
            self._tree.keep()
        self.acknowledge(slots)
        return True

    def _put_peer(self, leaf: int, r: int, slot: SlotView) -> None:
        plan = self._grads.plan
        num = len(plan.params)
        data = slot.payload(num, plan.position(self.rank, r), plan.own_numel, slot.dtype)
        if slot.all_present:
            self._tree.put(leaf, data, torch.ones(num, dtype=plan.layout.dtype))
            return
        present = slot.presence(num)
        chunk = torch.zeros(plan.layout.chunk_numel, dtype=plan.layout.dtype)
        for i, (at, numel) in enumerate(plan.own):  # others hold old data
            if present[i]:
                chunk[at : at + numel].copy_(data[at : at + numel])
                chunk[plan.counts_offset + i] = 1
        self._tree.put_chunk(leaf, chunk)


def finished_chunk(grads: OutgoingGrads, out: torch.Tensor) -> torch.Tensor:
    """This rank's own leaf: zeros where no gradient came, and the counts."""
    plan = grads.plan
    for (at, numel), present in zip(plan.own, grads.present, strict=True):
        if not present:
            out[at : at + numel].zero_()
    out[plan.own_numel : plan.counts_offset].zero_()
    out[plan.counts_offset :].copy_(torch.tensor(grads.present, dtype=out.dtype))
    return out


class ReplicaTree(Exchange):
    """The total over all replicas' nodes, on each of them."""

    def __init__(self, mailbox: Mailbox, bucket: Bucket, tree: TreeSum) -> None:
        super().__init__(mailbox, bucket, REPLICATE, bucket.replicate)
        size = bucket.replicate.size
        self._tree = tree
        self._numel = tree.layout.chunk_numel
        self._piece = -(-self._numel // (size * _PIECE_ALIGN)) * _PIECE_ALIGN
        self._slots: dict[int, SlotView] = {}
        self._nodes = tree.take_nodes(torch.empty(0, dtype=tree.layout.dtype))
        itemsize = tree.layout.dtype.itemsize
        self._result = torch.empty(self._numel, dtype=tree.layout.dtype)
        # A replica without micro-batches has no node, and yet a piece of the total to show.
        rows = max(1, len(self._nodes))
        self._slot = mailbox.pool.acquire(self, 0, rows * self._numel * itemsize)
        start, stop = self._span(self.rank)
        with torch.no_grad():
            for k, node in enumerate(self._nodes):
                for a, b in ((0, start), (stop, self._numel)):
                    self._row(self._slot, k, a, b).copy_(node[a:b])
        mailbox.post(self, self._slot, tree.layout.dtype, [], self._numel)

    def lacks(self, index: int) -> bool:
        if not self._slots:
            return super().lacks(index)
        return any(self.indices[r] == index and slot.stage < 2 for r, slot in self._slots.items())

    def advance(self) -> bool:
        with torch.no_grad():
            if not self._slots:
                if not self.all_posted():
                    return False
                self._slots = self.slots(self._numel, 0)
                self._show_own_piece()
            if any(slot.stage < 2 for slot in self._slots.values()):
                return False
            self.mailbox.domain.order()
            for r, slot in self._slots.items():
                start, stop = self._span(r)
                self._result[start:stop].copy_(self._row(slot, 0, start, stop))
        self._tree.result = self._result
        self.acknowledge(self._slots)
        return True

    def _show_own_piece(self) -> None:
        start, stop = self._span(self.rank)
        holdings = self._tree.holdings
        pieces = [
            [node[start:stop] for node in self._nodes]
            if q == self.rank
            else [self._row(self._slots[q], k, start, stop) for k in range(len(nodes))]
            for q, nodes in enumerate(holdings.nodes)
        ]
        # Kept here too: once all peers have read it, the slot may serve another reduction.
        own = self._result[start:stop].copy_(fold_pieces(holdings, pieces))
        self._row(self._slot, 0, start, stop).copy_(own)
        self._nodes = []
        self.mailbox.domain.order()
        self._slot.stage = 2
        self.mailbox.domain.doorbell.ring()

    def _row(self, slot: SlotView, k: int, start: int, stop: int) -> torch.Tensor:
        return slot.payload(0, k * self._numel + start, stop - start, self._tree.layout.dtype)

    def _span(self, rank: int) -> tuple[int, int]:
        return min(rank * self._piece, self._numel), min((rank + 1) * self._piece, self._numel)
