"""Sums in tree order over process groups: all-to-all, then additions in the owner's memory.

    collect    rank-major gradients -> all-to-all over the shard axis -> one leaf per rank
    complete   nodes, cut into one piece per replica -> all-to-all -> tree sum -> all-gather

An all-to-all of the packed buffer moves what a reduce-scatter moves. Received leaves lie in one
staging buffer, which is free again as soon as `TreeSum.keep` has run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch_compat import all_gather_call
from shardwise.comm.c10d.bucket import C10dBucket
from shardwise.comm.c10d.packed_grads import PackedGrads
from shardwise.comm.ordered import Issued, Ordered
from shardwise.comm.transport import DONE, Handle
from shardwise.comm.tree_sum import TreeSum, fold_pieces

Issue = Callable[..., Any]  # (bucket, call, *args) -> work, with the transport's own checks


def collect(
    transport: Ordered[C10dBucket],
    issue: Issue,
    bucket: C10dBucket,
    grads: PackedGrads,
    out: torch.Tensor,
    tree: TreeSum,
    leaves: tuple[int | None, ...],
    keeps: Any = None,
) -> Handle:
    """See `TreeTransport.collect`; `keeps`: what the packed gradients are copied from."""
    plan, staging = grads.plan, grads.finish()
    packed = staging.packed
    if bucket.shard.size == 1:
        if leaves[0] is not None:
            tree.put_chunk(leaves[0], out)
        return DONE
    if not out.numel():
        return DONE
    world, num = bucket.shard.size, len(plan.layout.indices)
    sizes = [plan.packing.chunk(packed, r).numel() for r in range(world)]
    own, data = sizes[bucket.shard.rank], plan.own[1]
    received = packed.new_empty(world * own)
    works = [
        issue(bucket, _all_to_all, received, packed, [own] * world, sizes, bucket.group_of_sums)
    ]

    def finish() -> None:
        for leaf, part in zip(leaves, received.split(own), strict=True):
            if leaf is not None:
                tree.put(leaf, part[:data], part[own - num :])
        tree.keep()
        staging.give_back()

    return Issued(transport, bucket, works, "tree reduction", finish, keeps)


def complete(
    transport: Ordered[C10dBucket], issue: Issue, bucket: C10dBucket, tree: TreeSum
) -> Handle:
    """See `TreeTransport.complete`."""
    axis, like = bucket.replicate, bucket.buffer
    if axis.size == 1 or not tree.layout.chunk_numel:
        tree.finish_alone(like)
        return DONE
    numel, replicas = tree.layout.chunk_numel, axis.size
    piece = -(-numel // replicas)
    like = like.new_empty(0, dtype=tree.layout.dtype)
    sent = _by_destination(tree.take_nodes(like), replicas, piece, like)
    num_nodes = [len(nodes) for nodes in tree.holdings.nodes]
    received = sent.new_empty(sum(num_nodes) * piece)
    works = [
        issue(
            bucket,
            _all_to_all,
            received,
            sent,
            [n * piece for n in num_nodes],
            [num_nodes[axis.rank] * piece] * replicas,
            axis.group,
        )
    ]

    def finish() -> None:
        held = received.view(-1, piece).split(num_nodes)
        own = fold_pieces(tree.holdings, [nodes.unbind() for nodes in held])
        whole = own.new_empty(replicas * piece)
        issue(bucket, _all_gather, whole, own, axis.group).wait()
        tree.result = whole[:numel]

    return Issued(transport, bucket, works, "all_reduce in tree order", finish)


def _by_destination(
    nodes: list[torch.Tensor], replicas: int, piece: int, like: torch.Tensor
) -> torch.Tensor:
    """[replica, node, element of its piece], zeros behind the end; nothing from a replica without
    micro-batches.
    """
    rows = like.new_zeros(len(nodes), replicas * piece)
    for row, node in zip(rows, nodes, strict=True):
        row[: node.numel()].copy_(node)
    return rows.view(len(nodes), replicas, piece).transpose(0, 1).reshape(-1)


def _all_to_all(
    out: torch.Tensor,
    packed: torch.Tensor,
    out_sizes: list[int],
    in_sizes: list[int],
    group: dist.ProcessGroup | None,
) -> Any:
    return dist.all_to_all_single(out, packed, out_sizes, in_sizes, group=group, async_op=True)


def _all_gather(out: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    return all_gather_call()(out, part.contiguous(), group=group, async_op=True)
