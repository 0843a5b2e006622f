"""The transport for CPU ranks of one host: one-sided reads of shards, mailboxes for gradients.

`gather` and the fences: gather.py, domain.py. `grad_buffer`, `reduce`, `all_reduce`: grads.py,
mailbox.py. Nothing here is asynchronous: a gather is complete when it returns, a reduction is
completed by whichever rank's call finds all posts. All calls of one mesh come one after the other,
from whatever thread.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.comm.shared_memory.control import hash_of
from shardwise.comm.shared_memory.domain import Domain, domain_of
from shardwise.comm.shared_memory.gather import (
    SharedBucket,
    check_still_there,
    make_plan,
    plan_for,
)
from shardwise.comm.shared_memory.grads import Members, OutgoingGrads
from shardwise.comm.shared_memory.mailbox import Mailbox
from shardwise.comm.shared_memory.reductions import ShardSum, sum_over_replicas
from shardwise.comm.shared_memory.tree import ReplicaTree, TreeLeaves, finished_chunk
from shardwise.comm.transport import DONE, Axis, GradBuffer, Handle, Missing, Position, Transport
from shardwise.comm.tree_sum import TreeSum
from shardwise.errors import TransportError
from shardwise.layout import BucketLayout, ReduceLayout, layout_reduce


def shared_memory_reason(axes: Iterable[Axis]) -> str | None:
    """Why shared memory cannot serve a mesh (axes: shard, replicate); None where it can.

    Collective on the first call for a mesh, and the same answer on all its ranks.
    """
    shard, replicate = axes
    domain = domain_of(shard, replicate)
    return domain if isinstance(domain, str) else None


class SharedMemoryTransport(Transport[SharedBucket]):
    """Collective on the first construction for a mesh.

    Raises TransportError with the reason where it cannot work.
    """

    name = "shared_memory"
    is_ordered = False
    reads_at_any_time = sums_in_tree = True

    def __init__(self, shard: Axis, replicate: Axis, mesh: tuple[Axis, Axis] | None = None) -> None:
        """`mesh`: the axes of the mesh that these belong to, if they are not the whole of it."""
        domain = domain_of(*(mesh or (shard, replicate)))
        if isinstance(domain, str):
            raise TransportError(
                f"transport='shared_memory' cannot serve this mesh: {domain}. Use 'auto' or 'c10d'."
            )
        self._shard, self._replicate = shard, replicate
        self._domain = domain  # which transports of one set of ranks share
        if domain.mail is None:
            domain.mail = Mailbox(domain)
        assert isinstance(domain.mail, Mailbox)
        self._mail = domain.mail

    @property
    def phases(self) -> Domain:
        return self._domain

    def attach(self, name: str, layout: BucketLayout, device: torch.device) -> SharedBucket:
        """No communication: peers look the bucket up at its first gather, by its number."""
        if device.type != "cpu":
            raise ValueError(
                f"{name}: shared memory serves CPU parameters, these are on {device}; use "
                "transport='c10d'."
            )
        self._shard.check(name, layout.world)
        domain = self._domain
        key, domain.num_attached = domain.num_attached, domain.num_attached + 1
        record = domain.own.record(key)
        fingerprint = hash_of(name, layout)
        if layout.world == 1 or not layout.chunk_numel:
            offset, buffer = 0, torch.zeros(layout.chunk_numel, dtype=layout.dtype)
        else:
            offset = domain.arena.allocate(layout.shard_bytes)
            buffer = domain.arena.owned_tensor(
                offset, layout.chunk_numel, layout.dtype, record.mark_released
            )
        record.publish(name, offset, layout.shard_bytes, fingerprint)
        domain.buckets[key] = bucket = SharedBucket(
            *(name, layout, self._shard, self._replicate, buffer),
            key=key,
            fingerprint=fingerprint,
            indices=tuple(domain.ranks.index(r) for r in self._shard.ranks),
            address=buffer.data_ptr(),
            members=Members(layout_reduce(layout)),  # until a reduction says which
        )
        return bucket

    def gather(self, bucket: SharedBucket, shard: torch.Tensor, out: torch.Tensor) -> Handle:
        if bucket.layout.world == 1:
            if shard.data_ptr() != out.data_ptr():
                make_plan(bucket.layout, [shard], out).run()
            return DONE
        domain = self._domain
        if shard.data_ptr() != bucket.address:
            raise TransportError(
                f"{bucket.name}: shared memory gathers from the bucket's own buffer, which peers "
                "can read; found another tensor. Write to the buffer, or use transport='c10d'."
            )
        domain.own.at = bucket.key + 1
        domain.entry_fence()
        plan_for(domain, bucket, out).run()
        domain.check_gone()
        check_still_there(domain, bucket)
        return DONE

    def grad_buffer(
        self, bucket: SharedBucket, layout: ReduceLayout, out: torch.Tensor, pre_scale: float = 1.0
    ) -> GradBuffer:
        return OutgoingGrads(bucket.reduce_plan(layout), self._mail.pool, out, pre_scale)

    def reduce(
        self, bucket: SharedBucket, grads: GradBuffer, out: torch.Tensor, scale: float
    ) -> Handle:
        assert isinstance(grads, OutgoingGrads), f"{type(grads).__name__} is another transport's"
        assert grads.out is out, "reduce() takes the `out` that grad_buffer() was given"
        grads.finish()
        bucket.members = grads.plan.members
        if not grads.plan.params:
            return DONE
        if bucket.layout.world == 1:
            with torch.no_grad():
                out = finished_chunk(grads, out)
                if scale != 1.0:
                    out[: grads.plan.own_numel].mul_(scale)
            return DONE
        return ShardSum(self._mail, bucket, grads, out, scale)

    def all_reduce(self, bucket: SharedBucket, out: torch.Tensor) -> Handle:
        if bucket.replicate.size == 1 or not out.numel():
            return DONE
        return sum_over_replicas(self._mail, bucket, out)

    def collect(
        self,
        bucket: SharedBucket,
        grads: GradBuffer,
        out: torch.Tensor,
        tree: TreeSum,
        leaves: tuple[int | None, ...],
    ) -> Handle:
        assert isinstance(grads, OutgoingGrads), f"{type(grads).__name__} is another transport's"
        grads.finish()
        if not grads.plan.params:
            return DONE
        if bucket.layout.world > 1:
            return TreeLeaves(self._mail, bucket, grads, out, tree, leaves)
        if leaves[0] is not None:
            with torch.no_grad():
                tree.put_chunk(leaves[0], finished_chunk(grads, out))
        return DONE

    def complete(self, bucket: SharedBucket, tree: TreeSum) -> Handle:
        if bucket.replicate.size > 1 and tree.layout.chunk_numel:
            bucket.members = bucket.reduce_plan(tree.layout).members
            return ReplicaTree(self._mail, bucket, tree)
        tree.finish_alone(bucket.buffer)
        return DONE

    def enter(self, position: Position) -> None:
        self._domain.enter(position)

    def leave(self, position: Position) -> None:
        self._domain.leave()

    def give_up(self) -> None:
        self._domain.give_up()

    def abandon(self) -> None:
        self.give_up()
        self._domain.abandon()

    def missing(self, position: Position) -> list[Missing]:
        return self._mail.missing()

    def agree(self, flags: list[bool]) -> list[bool]:
        return self._domain.agree(flags)

    def close(self) -> None:
        """Nothing to give back at once:

        buffers go with their tensors, the domain with its process group.
        """
