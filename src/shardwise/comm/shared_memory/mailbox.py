"""Reductions through mailboxes: every rank posts a slot for its peers, and reads theirs.

    rank 0   put w1, w2   post slot ............ sum own part of all slots -> out   acknowledge
    rank 1        put w2, w1        post slot .. sum                                acknowledge

There is no order among reductions: a post is found by bucket (its record in the owner's directory
carries tag and slot), so ranks may reduce in different orders. Whoever waits, for whatever,
completes all reductions that have their peers' posts; so a rank that waits for a free slot cannot
hold up a peer that waits for its reading.

A rank that does not reduce a bucket which others do learns of it at the end of its backward
(`missing`) and posts "nothing": a slot without data, every parameter absent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.comm.shared_memory.control import REPLICATE, SHARD, Record
from shardwise.comm.shared_memory.domain import Domain
from shardwise.comm.shared_memory.gather import Shards
from shardwise.comm.shared_memory.slots import Slot, SlotPool, SlotView
from shardwise.comm.transport import Axis, Bucket
from shardwise.errors import DivergenceError, TransportError


class Mailbox:
    """All exchanges of this rank in the current phase."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.pool = SlotPool(domain.arena, len(domain.ranks), self._wait_for_slot)
        self.pending: list[Exchange] = []
        self._tickets = 0
        self._posts: dict[tuple[int, int], tuple[int, Slot]] = {}  # count in this phase, last slot

    def post(
        self,
        exchange: Exchange,
        slot: Slot,
        dtype: torch.dtype,
        present: list[bool],
        part_numel: int,
    ) -> None:
        """Show a filled slot to the peers of the exchange."""
        domain, key, axis = self.domain, exchange.key, exchange.axis
        count, last = self._posts.get((key, axis), (0, None))
        if last is not None:  # the record has room for one post
            self._wait_read(last, exchange.bucket.name)
        count += 1
        self._tickets += 1
        self._posts[key, axis] = (count, slot)
        exchange.tag = domain.phase << 16 | count
        slot.describe(self._tickets, dtype, present, part_numel)
        slot.posted_to(self._tickets, tuple(i for i in exchange.indices if i != domain.me))
        record = domain.own.record(key)
        record.set_slot(axis, slot.offset)
        domain.order()
        record.set_tag(axis, exchange.tag)
        if _is_counted(exchange.bucket) and axis == _counted_axis(exchange.bucket):
            domain.own.posted = (domain.own.posted + _mix(key, count)) & (2**64 - 1)
        domain.doorbell.ring()
        self.pending.append(exchange)
        self.progress()

    def progress(self) -> None:
        """Complete whatever has all its posts."""
        if self.pending:
            # `done` first: an error in one exchange must not make those before it run again.
            self.pending = [e for e in self.pending if not (e.done or e.advance())]

    def finish(self, exchange: Exchange) -> None:
        """Wait for one exchange."""
        self.domain.entry_fence()
        self._wait(lambda: exchange.done, exchange.lacks, f"to reduce {exchange.bucket.name}")

    def finish_all(self) -> None:
        if self.pending:
            self.domain.entry_fence()
            names = ", ".join(dict.fromkeys(e.bucket.name for e in self.pending))
            self._wait(
                lambda: not self.pending,
                lambda i: any(e.lacks(i) for e in self.pending),
                f"to reduce {names}",
            )

    def drop_all(self) -> None:
        """The phase is over: what is pending fails when waited for."""
        for exchange in self.pending:
            exchange.failed = True
        self.pending = []
        self._posts.clear()

    def free_slots(self) -> None:
        """All ranks have left the phase before: nobody reads any more."""
        self.pool.free_all()

    def missing(self) -> list[Bucket]:
        """Buckets that peers reduce in this phase and this rank has not;

        empty once all ranks have ended.
        """
        domain = self.domain
        domain.entry_fence()
        phase, found = domain.phase, []
        if domain.own.ended != phase:
            domain.order()
            domain.own.ended = phase
            domain.doorbell.ring()

        def look() -> bool:
            # First who has ended, then what was posted: the last look then misses nothing.
            all_ended = all(domain.controls[i].ended == phase for i in domain.others)
            domain.order()
            found[:] = self._unposted()
            return bool(found) or all_ended

        self._wait(
            look, lambda i: domain.controls[i].ended != phase, "to reach the end of its backward"
        )
        domain.check_abandoned()
        return found

    def _unposted(self) -> list[Bucket]:
        domain = self.domain
        if all(domain.controls[i].posted == domain.own.posted for i in domain.others):
            return []
        found = []
        for key, bucket in sorted(domain.buckets.items(), key=lambda item: item[0]):
            if not _is_counted(bucket):
                continue
            axis = _counted_axis(bucket)
            count, _ = self._posts.get((key, axis), (0, None))
            tags = [domain.controls[i].record(key).tag(axis) for i in domain.others]
            if any(tag >> 16 == domain.phase and tag & 0xFFFF > count for tag in tags):
                found.append(bucket)
        return found

    def _wait(
        self,
        ready: Callable[[], bool],
        lacks: Callable[[int], bool],
        what: str,
        stuck: Callable[[], bool] | None = None,
    ) -> None:
        def progressed() -> bool:
            self.progress()
            return ready()

        self.domain.wait(progressed, lacks, what, stuck=stuck)

    def _wait_for_slot(
        self, ready: Callable[[], bool], lacks: Callable[[int], bool], stuck: Callable[[], bool]
    ) -> None:
        self.domain.entry_fence()
        self._wait(ready, lacks, "to read a reduction, since all mailbox slots are full", stuck)

    def _wait_read(self, slot: Slot, name: str) -> None:
        self.domain.entry_fence()
        self._wait(
            lambda: not slot.unread,
            lambda i: i in slot.unread,
            f"to read the reduction before of {name}",
        )


class Exchange:
    """One reduction in flight;

    also its handle. `indices[r]` is the domain's index of rank r of the axis.
    """

    def __init__(self, mailbox: Mailbox, bucket: Bucket, axis: int, mesh_axis: Axis) -> None:
        shards: Shards = bucket.private["shards"]
        domain = mailbox.domain
        self.mailbox, self.bucket = mailbox, bucket
        self.axis, self.rank = axis, mesh_axis.rank
        self.key, self._fingerprint = shards.key, shards.fingerprint
        self.indices = tuple(domain.ranks.index(r) for r in mesh_axis.ranks)
        self.tag = 0
        self.done = self.failed = False
        self._records: list[tuple[int, int, Record]] = [
            (r, i, domain.controls[i].record(shards.key))
            for r, i in enumerate(self.indices)
            if r != self.rank
        ]

    def wait(self) -> None:
        if self.failed:
            raise TransportError(
                f"the reduction of {self.bucket.name} was dropped, because its phase ended by an "
                "exception; the gradients of this step are incomplete: zero them and run the step "
                "again."
            )
        if not self.done:
            self.mailbox.finish(self)

    def lacks(self, index: int) -> bool:
        return any(
            i == index and record.tag(self.axis) != self.tag for _, i, record in self._records
        )

    def advance(self) -> bool:
        """Do what can be done; True when it is over."""
        raise NotImplementedError(
            f"{type(self).__name__} is completed by its subclasses' advance()"
        )

    def all_posted(self) -> bool:
        axis, tag = self.axis, self.tag
        for _, _, record in self._records:
            if record.tag(axis) != tag:
                return False
        self.mailbox.domain.order()
        return True

    def slots(self, part_numel: int, num_params: int) -> dict[int, SlotView]:
        """The peers' posted slots by rank of the axis, once it is sure that they are of the same "
        "bucket."""
        domain, slots = self.mailbox.domain, {}
        for r, i, record in self._records:
            slot = SlotView(domain.controls[i].mapping, record.slot(self.axis), len(domain.ranks))
            if record.fingerprint != self._fingerprint or slot.shape != (part_numel, num_params):
                raise DivergenceError(
                    f"bucket {self.bucket.name!r}: rank {domain.ranks[domain.me]} reduces "
                    f"{num_params} parameters in parts of {part_numel} elements, rank "
                    f"{domain.ranks[i]} has {record.name!r} with {slot.shape[1]} in parts of "
                    f"{slot.shape[0]}. All ranks must shard the same modules in the same order and "
                    "train the same parameters (requires_grad)."
                )
            slots[r] = slot
        return slots

    def acknowledge(self, slots: dict[int, SlotView]) -> None:
        domain = self.mailbox.domain
        domain.order()  # reads come before the flag
        for slot in slots.values():
            slot.acknowledge(domain.me, slot.ticket)
        domain.doorbell.ring()
        self.done = True


def _is_counted(bucket: Bucket) -> bool:
    """False for one whose reductions follow those of another bucket: nobody can miss them alone."""
    return "follows" not in bucket.private


def _counted_axis(bucket: Bucket) -> int:
    """The axis whose posts say that a bucket is reduced:

    `no_shard` has nothing to post on the shard axis.
    """
    return SHARD if bucket.shard.size > 1 else REPLICATE


def _mix(key: int, count: int) -> int:
    """A term of the hash of what was posted: a sum of them does not depend on the order."""
    x = (key << 16 | count) * 0x9E3779B97F4A7C15 & (2**64 - 1)
    x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    return x ^ x >> 29
