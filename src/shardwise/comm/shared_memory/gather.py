"""One-sided gathers: every part straight from its owner's memory to its place in the whole.

Source and destination of each part are views, made once for each pair of bucket and `out` and
copied by one foreach call per gather: the host's work is one dispatch per part. The views stay
valid while the storage of `out` is resized to 0 and back, because a view asks its storage for the
address at each use; they are never touched in between.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from shardwise._torch_compat import foreach_copy
from shardwise.comm.shared_memory.control import LIVE, Record
from shardwise.comm.shared_memory.domain import Domain
from shardwise.comm.shared_memory.grads import Members, ReducePlan
from shardwise.comm.transport import Bucket
from shardwise.errors import DivergenceError
from shardwise.layout import BucketLayout, ReduceLayout


@dataclass(slots=True, eq=False, kw_only=True)
class SharedBucket(Bucket):
    """A bucket with its place in the domain: its `key` there, what its reductions are about, and
    its plans, those of gathers by `out`.
    """

    key: int
    fingerprint: int
    indices: tuple[int, ...]  # of the shard axis' ranks in the domain
    address: int  # of the buffer that peers read
    members: Members  # of the last reduction, which a sum over the replicas follows
    records: tuple[Record, ...] = ()  # the peers', once checked
    plans: dict[int, tuple[weakref.ref[torch.Tensor], CopyPlan]] = field(default_factory=dict)
    reduce_plans: dict[int, ReducePlan] = field(default_factory=dict)

    def views_of(self, out: torch.Tensor) -> int:
        known = self.plans.get(id(out))
        return len(known[1].destinations) if known is not None and known[0]() is out else 0

    def reduce_plan(self, layout: ReduceLayout) -> ReducePlan:
        """Made once for each layout; it holds the layout, whose id is thus its own."""
        plan = self.reduce_plans.get(id(layout))
        if plan is None:
            if len(self.reduce_plans) > 8:  # `requires_grad` is toggled over and over
                self.reduce_plans.clear()
            plan = self.reduce_plans[id(layout)] = ReducePlan.of(layout, self.shard.rank)
        return plan


@dataclass(frozen=True, slots=True)
class CopyPlan:
    destinations: list[torch.Tensor]
    sources: list[torch.Tensor]

    def run(self) -> None:
        if self.sources:
            with torch.no_grad():
                foreach_copy(self.destinations, self.sources)


def check_peers(domain: Domain, bucket: SharedBucket) -> None:
    """The peers' records of this bucket; an error when they hold something else. After an entry
    fence.
    """
    records = []
    for i in bucket.indices:
        if i == domain.me:
            continue
        record = domain.controls[i].record(bucket.key)
        if record.state != LIVE or record.fingerprint != bucket.fingerprint:
            found = (
                "has released it"
                if record.state not in (0, LIVE)
                else "has none there"
                if record.state != LIVE
                else f"holds {record.name!r} of {record.size_bytes} bytes"
            )
            raise DivergenceError(
                f"bucket {bucket.name!r} is number {bucket.key} on rank {domain.ranks[domain.me]} "
                f"({bucket.layout.shard_bytes} bytes for each rank), rank {domain.ranks[i]} "
                f"{found}. All ranks must shard the same modules in the same order, and delete "
                "models at the same point."
            )
        records.append(record)
    bucket.records = tuple(records)


def plan_for(domain: Domain, bucket: SharedBucket, out: torch.Tensor) -> CopyPlan:
    """The plan of this `out`, made at its first use and dropped when it dies."""
    known = bucket.plans.get(id(out))
    if known is not None and known[0]() is out:
        return known[1]
    check_peers(domain, bucket)
    flats = [
        bucket.buffer
        if i == domain.me
        else domain.controls[i].mapping.tensor(
            domain.controls[i].record(bucket.key).offset,
            bucket.layout.chunk_numel,
            bucket.layout.dtype,
        )
        for i in bucket.indices
    ]
    plan = make_plan(bucket.layout, flats, out)
    plans, key = bucket.plans, id(out)
    plans[key] = (weakref.ref(out, lambda _: plans.pop(key, None)), plan)
    return plan


def make_plan(layout: BucketLayout, flats: list[torch.Tensor], out: torch.Tensor) -> CopyPlan:
    """Views for `flats[r]` (shard buffer of rank r) -> `out` (whole parameters)."""
    destinations, sources = [], []
    with torch.no_grad():
        for rank, flat in enumerate(flats):
            for param, offset in zip(layout.params, layout.shard_offsets(rank), strict=True):
                if not param.shard_numel(rank):
                    continue
                size = (param.outer, param.cuts.size(rank) * param.inner)
                start = param.full_offset + param.cuts.start(rank) * param.inner
                sources.append(flat.as_strided(size, (size[1], 1), flat.storage_offset() + offset))
                # Over the storage, not a view of `out`, which a view would keep alive for good.
                place = torch.empty(0, dtype=out.dtype).set_(
                    out.untyped_storage(),
                    out.storage_offset() + start,
                    size,
                    (param.rows * param.inner, 1),
                )
                destinations.append(place)
    return CopyPlan(destinations, sources)


def check_still_there(domain: Domain, bucket: SharedBucket) -> None:
    """After the copy: a bucket that its owner released meanwhile reads as zeros."""
    for record in bucket.records:
        if record.state != LIVE:
            check_peers(domain, bucket)
