"""Wire formats over process groups: who moves the bytes of a bucket, and its packing around them.

    gather       shard -> encoded parts -> staging, or the gathered buffer -> copy-out
    reduce       packed gradients -> encoded pieces -> float32 sum -> this rank's chunk
    all_reduce   the same over the replicate axis, for all

Gathers of buckets that are not padded, and all reductions, are all-to-alls: a rank receives what is
its own and no more. (Gloo has no reduce-scatter, it all-reduces all gradients.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch_compat import all_gather_call
from shardwise.comm.c10d.bucket import C10dBucket
from shardwise.comm.c10d.packed_grads import PackedGrads
from shardwise.comm.c10d.staging import GatherPlan, GatherStaging
from shardwise.comm.groups import of_hosts
from shardwise.comm.kept import kept
from shardwise.comm.ordered import Ordered
from shardwise.comm.transport import Handle
from shardwise.comm.wires import gather as weights
from shardwise.comm.wires import reduce as sums
from shardwise.comm.wires.reduce import Feedback
from shardwise.comm.wires.steps import Buffers, Chunks, Steps
from shardwise.layout.wire import EXACT, AxisWire

Issue = Callable[..., Any]  # (bucket, call, *args) -> work, with the transport's own checks


class GroupMover:
    """Moves bytes by one process group. `what` they are says the order check, so that ranks with
    other formats are told, and not paired.
    """

    def __init__(
        self, issue: Issue, bucket: C10dBucket, group: Any, size: int, rank: int, what: str
    ) -> None:
        self._issue, self._bucket, self._group, self._what = issue, bucket, group, what
        self.size, self.rank = size, rank
        self.buffers = kept("buffers of wire formats").setdefault("", Buffers())

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Any:
        return self._issue(self._bucket, _named(_all_gather, self._what), out, part, self._group)

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
    ) -> Any:
        call = _named(_all_to_all, self._what)
        return self._issue(self._bucket, call, out, sent, out_sizes, in_sizes, self._group)


def gathers(bucket: C10dBucket) -> bool:
    """Whether a bucket's gathers are moved here."""
    wire = bucket.layout.wire.shard
    rounds = wire.gather.is_lossy and not bucket.keeps_bits
    return rounds or bool(wire.host_ranks and bucket.layout.sends_padded)


def reduces(bucket: C10dBucket) -> bool:
    """Whether its reductions over the shard axis are."""
    wire = bucket.layout.wire.shard
    return bucket.shard.size > 1 and (wire.reduce.is_lossy or wire.host_ranks > 0)


def gather(
    transport: Ordered[C10dBucket],
    issue: Issue,
    bucket: C10dBucket,
    shard: torch.Tensor,
    out: torch.Tensor,
) -> Handle:
    """See `Transport.gather`."""
    plan, wire, rank = GatherPlan.of(bucket), bucket.layout.wire.shard, bucket.shard.rank
    staging = None if plan.in_place else GatherStaging.take(bucket, plan, out, bucket.memory)
    packed = out if staging is None else staging.packed
    chunks = Chunks.of(plan.packing)
    part = shard[: chunks.numel(rank)]
    part = part if part.device == out.device else part.to(out.device, non_blocking=True)
    form = EXACT if bucket.keeps_bits else wire.gather
    what = f"gather_{form.name}"
    if plan.padded and wire.host_ranks:
        movers = _movers_of_hosts(issue, bucket, bucket.shard.group, what)
        part = part.to(out.dtype) if not form.is_lossy else part
        moving = weights.gather_by_hosts(*movers, form, part, packed)
    else:
        mover = _mover(issue, bucket, bucket.shard.group, what)
        moving = weights.gather(mover, form, part, packed, chunks)

    def steps() -> weights.Moving:
        yield from moving
        if staging is not None:
            staging.unpack()

    return Steps(transport, bucket, "gather", steps(), shard)


def reduce(
    transport: Ordered[C10dBucket],
    issue: Issue,
    bucket: C10dBucket,
    grads: PackedGrads,
    out: torch.Tensor,
    scale: float,
) -> Handle:
    """See `Transport.reduce`."""
    plan, staging = grads.plan, grads.finish()
    wire, num = bucket.layout.wire.shard, len(plan.layout.indices)
    chunks = Chunks.of(plan.packing)
    what = f"reduce_{wire.reduce.name}"
    counts_offset = plan.layout.counts_offset

    data = chunks.numel(bucket.shard.rank) - num
    result = sums.Result(out[:data], out[counts_offset:], scale)
    feedback = _feedback(bucket, wire, plan.layout.indices)
    given = staging.packed, chunks, num, result, feedback
    if plan.padded and wire.host_ranks:
        movers = _movers_of_hosts(issue, bucket, bucket.group_of_sums, what)
        moving = sums.reduce_by_hosts(*movers, wire.reduce, *given)
    else:
        mover = _mover(issue, bucket, bucket.group_of_sums, what)
        moving = sums.reduce(mover, wire.reduce, *given)

    def steps() -> sums.Moving:
        yield from moving
        out[data:counts_offset].zero_()
        staging.give_back()

    return Steps(transport, bucket, "reduce", steps())


def all_reduce(
    transport: Ordered[C10dBucket], issue: Issue, bucket: C10dBucket, out: torch.Tensor
) -> Handle:
    """See `Transport.all_reduce`."""
    assert bucket.reduce_plan is not None, "gradients were packed before"
    layout, wire, axis = bucket.reduce_plan.layout, bucket.layout.wire.replicate, bucket.replicate
    what = f"all_reduce_{wire.reduce.name}"
    mover = GroupMover(issue, bucket, axis.group, axis.size, axis.rank, what)
    feedback = _feedback(bucket, wire, layout.indices)
    moving = sums.all_reduce(
        mover, wire.reduce, out, layout.replica_parts, len(layout.indices), feedback
    )
    return Steps(transport, bucket, "all_reduce", moving)


def _feedback(bucket: C10dBucket, wire: AxisWire, about: tuple[int, ...]) -> Feedback | None:
    if not wire.feeds_back:
        return None
    if bucket.feedback is None:
        bucket.feedback = Feedback()
    return bucket.feedback.of(about)


def _mover(issue: Issue, bucket: C10dBucket, group: Any, what: str) -> GroupMover:
    axis = bucket.shard
    return GroupMover(issue, bucket, group, axis.size, axis.rank, what)


def _movers_of_hosts(
    issue: Issue, bucket: C10dBucket, group: Any, what: str
) -> tuple[GroupMover, GroupMover]:
    """Between hosts, inside this one."""
    ranks, rank, inside = bucket.shard.ranks, bucket.shard.rank, bucket.layout.wire.shard.host_ranks
    across, within = of_hosts(ranks, rank, inside, group, bucket.device)
    hosts = len(ranks) // inside
    return (
        GroupMover(issue, bucket, across, hosts, rank // inside, f"{what}_between_hosts"),
        GroupMover(issue, bucket, within, inside, rank % inside, f"{what}_inside_hosts"),
    )


@functools.cache
def _named(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The call under the name that the order check and errors show."""

    def named(*args: Any) -> Any:
        return call(*args)

    named.__name__ = name
    return named


def _all_gather(out: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
    return all_gather_call()(out, part, group=group, async_op=True)


def _all_to_all(
    out: torch.Tensor, sent: torch.Tensor, out_sizes: list[int], in_sizes: list[int], group: Any
) -> Any:
    return dist.all_to_all_single(out, sent, out_sizes, in_sizes, group=group, async_op=True)
