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
from shardwise.comm.transport import Bucket
from shardwise.errors import DivergenceError
from shardwise.layout import BucketLayout


@dataclass(slots=True)
class Shards:
    """A bucket's place in the domain (in `bucket.private`), and its copy plans by `out`."""

    key: int
    fingerprint: int
    indices: tuple[int, ...]  # of the shard axis' ranks in the domain
    address: int = 0  # of the buffer that peers read
    records: tuple[Record, ...] = ()  # the peers', once checked
    plans: dict[int, tuple[weakref.ref[torch.Tensor], CopyPlan]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    destinations: list[torch.Tensor]
    sources: list[torch.Tensor]

    def run(self) -> None:
        if self.sources:
            with torch.no_grad():
                foreach_copy(self.destinations, self.sources)


def check_peers(domain: Domain, bucket: Bucket, shards: Shards) -> None:
    """The peers' records of this bucket;

    an error when they hold something else. After an entry fence.
    """
    records = []
    for i in shards.indices:
        if i == domain.me:
            continue
        record = domain.controls[i].record(shards.key)
        if record.state != LIVE or record.fingerprint != shards.fingerprint:
            found = (
                "has released it"
                if record.state not in (0, LIVE)
                else "has none there"
                if record.state != LIVE
                else f"holds {record.name!r} of {record.size_bytes} bytes"
            )
            raise DivergenceError(
                f"bucket {bucket.name!r} is number {shards.key} on rank {domain.ranks[domain.me]} "
                f"({bucket.layout.shard_bytes} bytes for each rank), rank {domain.ranks[i]} "
                f"{found}. All ranks must shard the same modules in the same order, and delete "
                "models at the same point."
            )
        records.append(record)
    shards.records = tuple(records)


def plan_for(domain: Domain, bucket: Bucket, shards: Shards, out: torch.Tensor) -> CopyPlan:
    """The plan of this `out`, made at its first use and dropped when it dies."""
    known = shards.plans.get(id(out))
    if known is not None and known[0]() is out:
        return known[1]
    check_peers(domain, bucket, shards)
    flats = [
        bucket.buffer
        if i == domain.me
        else domain.controls[i].mapping.tensor(
            domain.controls[i].record(shards.key).offset,
            bucket.layout.chunk_numel,
            bucket.layout.dtype,
        )
        for i in shards.indices
    ]
    plan = make_plan(bucket.layout, flats, out)
    plans, key = shards.plans, id(out)
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


def check_still_there(domain: Domain, bucket: Bucket, shards: Shards) -> None:
    """After the copy: a bucket that its owner released meanwhile reads as zeros."""
    for record in shards.records:
        if record.state != LIVE:
            check_peers(domain, bucket, shards)
