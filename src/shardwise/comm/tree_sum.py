"""Reductions in a fixed order: what a transport adds so that sums do not depend on the ranks.

A usual reduction sums over ranks. Here every rank's gradients are one leaf of a tree over the
micro-batches of a step (`layout.tree`), and the owner of a shard keeps the leaves that it receives
as nodes of that tree, until the step is over:

    collect(bucket, grads, out, tree, leaves)   every round: gradients of all ranks of the shard
                                                axis -> leaves in the owner's `TreeSum`
    complete(bucket, tree)                      after the last: nodes of all replicas -> the total

Both move exactly what a reduce-scatter and an all-reduce would move; only the additions differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import torch

from shardwise.comm.transport import GradBuffer, Handle
from shardwise.layout import ReduceLayout
from shardwise.layout.tree import Forest, Holdings, Node, fold


class TreeTransport(Protocol):
    """What a transport has besides that can sum in tree order (`sums_in_tree`)."""

    def collect(
        self,
        bucket: Any,
        grads: GradBuffer,
        out: torch.Tensor,
        tree: TreeSum,
        leaves: tuple[int | None, ...],
    ) -> Handle:
        """Put the shard axis's gradients into `tree`: rank r's as leaf `leaves[r]`, if it has one.

        `out` is what `grad_buffer` was given; `collect` may keep it.
        """
        ...

    def complete(self, bucket: Any, tree: TreeSum) -> Handle:
        """Sum over the replicas; when waited for, `tree.result` is the total on all of them."""
        ...


def sums_in_tree(transport: object) -> TypeGuard[TreeTransport]:
    """Whether a transport can."""
    return getattr(transport, "sums_in_tree", False)


class Part:
    """A flat partial sum: gradients and counts. `chunk` owns both and may be written; without it
    they are views of what somebody else will write again.
    """

    __slots__ = ("chunk", "counts", "data")

    def __init__(
        self, data: torch.Tensor, counts: torch.Tensor, chunk: torch.Tensor | None = None
    ) -> None:
        self.data, self.counts, self.chunk = data, counts, chunk


class TreeSum:
    """The partial sums of one bucket's shard on this rank, during a step.

    `holdings` has one entry for each rank of the bucket's replicate axis, this one's at `replica`.
    """

    def __init__(self, layout: ReduceLayout, rank: int, holdings: Holdings, replica: int) -> None:
        self.layout, self.holdings, self.replica = layout, holdings, replica
        self._numel = layout.data_numel(rank)
        self._forest: Forest[Part] = Forest(self._add)
        self.result: torch.Tensor | None = None

    # -- leaves ----------------------------------------------------------------------------------
    def put(self, leaf: int, data: torch.Tensor, counts: torch.Tensor) -> None:
        """A leaf in memory that is only lent; `keep` must follow before it is given back."""
        self._forest.put(Node(0, leaf), Part(data, counts))

    def put_chunk(self, leaf: int, chunk: torch.Tensor) -> None:
        """A leaf that is ours from now on, `chunk_numel` elements."""
        self._forest.put(Node(0, leaf), self._part(chunk))

    def keep(self) -> None:
        """Copy what is still in lent memory."""
        for part in self._forest.nodes.values():
            self._own(part)

    def _part(self, chunk: torch.Tensor) -> Part:
        return Part(chunk[: self._numel], chunk[self.layout.counts_offset :], chunk)

    def _own(self, part: Part) -> Part:
        if part.chunk is None:
            data, counts = part.data, part.counts
            new = self._part(data.new_zeros(self.layout.chunk_numel, dtype=self.layout.dtype))
            new.data.copy_(data)
            new.counts.copy_(counts)
            part.data, part.counts, part.chunk = new.data, new.counts, new.chunk
        return part

    def _add(self, first: Part, second: Part) -> Part:
        """Either order gives the same bits, so whichever may be written takes the other."""
        if first.chunk is None and second.chunk is not None:
            first, second = second, first
        self._own(first)
        first.data.add_(second.data)
        first.counts.add_(second.counts)
        return first

    # -- the end of a step -----------------------------------------------------------------------
    def take_nodes(self, like: torch.Tensor) -> list[torch.Tensor]:
        """What this replica holds, one chunk for each of its nodes; zeros where nothing was
        reduced.
        """
        chunks = []
        for node in self.holdings.nodes[self.replica]:
            part = self._forest.sum_of(node)
            if part is None:
                chunks.append(like.new_zeros(self.layout.chunk_numel, dtype=self.layout.dtype))
            else:
                chunk = self._own(part).chunk
                assert chunk is not None
                chunks.append(chunk)
        return chunks

    def finish_alone(self, like: torch.Tensor) -> None:
        """Without other replicas: the total of what is here."""
        part = self._forest.sum_of(Node(self.holdings.height, 0))
        if part is None:
            self.result = like.new_zeros(self.layout.chunk_numel, dtype=self.layout.dtype)
        else:
            self.result = self._own(part).chunk


def fold_pieces(holdings: Holdings, pieces: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The total of one piece; `pieces[q]` are replica q's nodes. Writes into a copy."""
    nodes = {
        node: piece
        for held, own in zip(holdings.nodes, pieces, strict=True)
        for node, piece in zip(held, own, strict=True)
    }
    total = fold(nodes, holdings.height, torch.add)
    assert total is not None, "some replica holds the first micro-batch"
    return total
