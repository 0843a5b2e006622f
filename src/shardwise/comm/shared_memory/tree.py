"""Sums in tree order through mailboxes: leaves are read where the peers have posted them.

    TreeLeaves    each rank's parts of all gradients become leaves of their owner's tree
    ReplicaTree   replicas post the nodes that they hold, cut into one piece per replica; each sums
                  its own piece, lays the total into its slot, and reads the others' totals

The stages are those of `reductions.py`; only the order of the additions differs.
"""

from __future__ import annotations

import torch

from shardwise.comm.shared_memory.control import SHARD
from shardwise.comm.shared_memory.gather import SharedBucket
from shardwise.comm.shared_memory.grads import OutgoingGrads
from shardwise.comm.shared_memory.mailbox import Exchange, Mailbox
from shardwise.comm.shared_memory.pieces import SumByPieces
from shardwise.comm.shared_memory.slots import SlotView
from shardwise.comm.tree_sum import TreeSum, fold_pieces


class TreeLeaves(Exchange):
    """One round: rank r of the shard axis brings leaf `leaves[r]`, or nothing that counts."""

    def __init__(
        self,
        mailbox: Mailbox,
        bucket: SharedBucket,
        grads: OutgoingGrads,
        out: torch.Tensor,
        tree: TreeSum,
        leaves: tuple[int | None, ...],
    ) -> None:
        super().__init__(mailbox, bucket, SHARD, bucket.shard, grads.plan.members)
        self._grads, self._out, self._tree, self._leaves = grads, out, tree, leaves
        mailbox.post(self, grads.open_slot(), grads.wire, grads.present, grads.plan.part_numel)

    def advance(self) -> bool:
        if not self.all_posted():
            return False
        slots = self.slots()
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


class ReplicaTree(SumByPieces):
    """The total over all replicas' nodes, on each of them."""

    def __init__(self, mailbox: Mailbox, bucket: SharedBucket, tree: TreeSum) -> None:
        super().__init__(mailbox, bucket, tree.layout.chunk_numel)
        self._tree = tree
        self._result = torch.empty(self._numel, dtype=tree.layout.dtype)
        self._nodes = tree.take_nodes(torch.empty(0, dtype=tree.layout.dtype))
        # A replica without micro-batches has no node, and yet a piece of the total to show.
        rows = max(1, len(self._nodes))
        size_bytes = rows * self._numel * tree.layout.dtype.itemsize
        self._slot = mailbox.pool.acquire(self, 0, size_bytes)
        self.post_foreign(self._nodes)

    def advance(self) -> bool:
        if not super().advance():
            return False
        self._tree.result = self._result
        return True

    def sum_own(self, start: int, stop: int) -> None:
        holdings = self._tree.holdings
        pieces = [
            [node[start:stop] for node in self._nodes]
            if q == self.rank
            else [self.row(self._slots[q], k, start, stop) for k in range(len(nodes))]
            for q, nodes in enumerate(holdings.nodes)
        ]
        # Kept here too: once all peers have read it, the slot may serve another reduction.
        self._result[start:stop].copy_(fold_pieces(holdings, pieces))
        self._nodes = []
