"""Reductions through mailboxes: every rank posts a slot for its peers, and reads theirs.

    rank 0   put w1, w2   post slot ............ sum own part of all slots -> out   acknowledge
    rank 1        put w2, w1        post slot .. sum                                acknowledge

There is no order among reductions: a post is found by bucket (its record in the owner's directory
carries tag, slot and members of the last one, each slot leads to the one before), so ranks may
reduce in different orders.

Why nobody waits for ever. A rank in a backward waits, at one of these places, until

    1  a slot of its own was read (`SlotPool.acquire`)
    2  in this domain all ranks have ended their backward, or some post is new to it (`missing`)
    3  a reduction that it has posted is complete (`finish`)

and whoever waits completes, in all domains in which it is in a phase, what has its peers' posts
(`_wait`), waking often where these are several, since each has a doorbell of its own.

1 ends: a rank whose peers all sleep, in whatever domain, takes one more slot; and after `LONGEST_S`
in any case, for peers may wait where shared memory sees nothing (a collective of c10d). 2 ends:
ranks come to it domain by domain in one order. In the first domain where somebody is, everybody
who is not has yet to end its backward, and is held up by nothing but 1. A rank finds there whatever
is posted before all have ended; what comes after that are answers to posts that it has answered
already. 3 ends: it is waited for behind 2 of all domains, so the first stage has all posts; a
second stage is issued by whoever has the first (`advance_reductions`), and what it then needs of
a peer (its post, its piece of the sum) the peer brings on in 1 or 3. No post waits for the one
before it of the same bucket.

A rank that does not reduce a bucket which others do learns of it at the end of its backward
(`missing`) and posts "nothing": a slot without data, every parameter absent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.comm.shared_memory.control import REPLICATE, SHARD, Record
from shardwise.comm.shared_memory.domain import Domain, running
from shardwise.comm.shared_memory.gather import SharedBucket
from shardwise.comm.shared_memory.grads import Members
from shardwise.comm.shared_memory.slots import Slot, SlotPool, SlotView
from shardwise.comm.transport import Axis, Bucket, Missing
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
        count += 1
        self._tickets += 1
        self._posts[key, axis] = (count, slot)
        exchange.tag = domain.phase << 16 | count
        exchange.identity = (part_numel, exchange.members.hash)
        slot.describe(self._tickets, dtype, present, exchange.identity)
        # The record shows the last post. Who lacks an earlier one finds it from there: none of the
        # slots in between was read by that rank, so none of them is free.
        slot.tag = exchange.tag
        slot.before = last.offset if last is not None and last.unread else 0
        slot.posted_to(self._tickets, tuple(i for i in exchange.indices if i != domain.me))
        record = domain.own.record(key)
        record.set_members(axis, exchange.members.mask_words)
        domain.order()
        record.set_slot(axis, slot.offset)
        domain.order()
        record.set_tag(axis, exchange.tag)
        if not exchange.bucket.follows and axis == _counted_axis(exchange.bucket):
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

    def missing(self) -> list[Missing]:
        """What peers reduce in this phase and this rank has not; nothing once all ranks have
        ended.
        """
        domain = self.domain
        domain.entry_fence()
        phase = domain.phase
        found: list[Missing] = []
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
        # Who has abandoned the phase since may be at an exception to which this rank comes too.
        return found

    def _unposted(self) -> list[Missing]:
        domain = self.domain
        if all(domain.controls[i].posted == domain.own.posted for i in domain.others):
            return []
        found = []
        for key, bucket in sorted(domain.buckets.items(), key=lambda item: item[0]):
            if bucket.follows:
                continue
            axis = _counted_axis(bucket)
            count, _ = self._posts.get((key, axis), (0, None))
            for record in (domain.controls[i].record(key) for i in domain.others):
                tag = record.tag(axis)
                if tag >> 16 == domain.phase and tag & 0xFFFF > count:
                    domain.order()
                    members = record.members(axis, len(bucket.layout.params))
                    found.append(Missing(bucket, members))
                    break
        return found

    def _wait(
        self,
        ready: Callable[[], bool],
        lacks: Callable[[int], bool],
        what: str,
        stuck: Callable[[], bool] | None = None,
    ) -> None:
        def progressed() -> bool:
            for domain in running():
                if domain.mail is not None:
                    domain.mail.progress()
            return ready()

        self.domain.wait(progressed, lacks, what, stuck=stuck)

    def _wait_for_slot(
        self, ready: Callable[[], bool], lacks: Callable[[int], bool], stuck: Callable[[], bool]
    ) -> None:
        self.domain.entry_fence()
        self._wait(ready, lacks, "to read a reduction, since all mailbox slots are full", stuck)


class Exchange:
    """One reduction in flight;

    also its handle. `indices[r]` is the domain's index of rank r of the axis.
    """

    identity: tuple[int, int] = (0, 0)  # of the post, on all ranks

    def __init__(
        self, mailbox: Mailbox, bucket: SharedBucket, axis: int, mesh_axis: Axis, members: Members
    ) -> None:
        domain = mailbox.domain
        self.mailbox, self.bucket, self.members = mailbox, bucket, members
        self.axis, self.rank = axis, mesh_axis.rank
        self.key, self._fingerprint = bucket.key, bucket.fingerprint
        self.indices = tuple(domain.ranks.index(r) for r in mesh_axis.ranks)
        self.tag = 0
        self.done = self.failed = False
        self._records: list[tuple[int, int, Record]] = [
            (r, i, domain.controls[i].record(bucket.key))
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
            i == index and record.tag(self.axis) < self.tag for _, i, record in self._records
        )

    def advance(self) -> bool:
        """Do what can be done; True when it is over."""
        raise NotImplementedError(
            f"{type(self).__name__} is completed by its subclasses' advance()"
        )

    def all_posted(self) -> bool:
        axis, tag = self.axis, self.tag
        for _, _, record in self._records:
            if record.tag(axis) < tag:
                return False
        self.mailbox.domain.order()
        return True

    def slots(self) -> dict[int, SlotView]:
        """The peers' posted slots by rank of the axis, once it is sure that they are about the same
        parameters of the same bucket.
        """
        domain, slots = self.mailbox.domain, {}
        for r, i, record in self._records:
            mapping, size = domain.controls[i].mapping, len(domain.ranks)
            slot = SlotView(mapping, record.slot(self.axis), size)
            while slot.tag != self.tag and slot.before:
                slot = SlotView(mapping, slot.before, size)
            if record.fingerprint != self._fingerprint or slot.identity != self.identity:
                raise DivergenceError(
                    f"bucket {self.bucket.name!r}: rank {domain.ranks[domain.me]} reduces "
                    f"{self._names(self.members.indices)} in parts of {self.identity[0]} elements, "
                    f"rank {domain.ranks[i]} has {record.name!r} with "
                    f"{self._names(record.members(self.axis, len(self.bucket.layout.params)))} in "
                    f"parts of {slot.identity[0]}. All ranks must shard the same modules in the "
                    "same order and train the same parameters (requires_grad), also in the "
                    "micro-batches of one accumulation."
                )
            slots[r] = slot
        return slots

    def _names(self, indices: tuple[int, ...] | None) -> str:
        if indices is None:
            return "other parameters"
        names = [self.bucket.layout.params[i].spec.name for i in indices]
        return f"{len(names)} parameters ({', '.join(names[:4])}{', ...' if names[4:] else ''})"

    def acknowledge(self, slots: dict[int, SlotView]) -> None:
        domain = self.mailbox.domain
        domain.order()  # reads come before the flag
        for slot in slots.values():
            slot.acknowledge(domain.me, slot.ticket)
        domain.doorbell.ring()
        self.done = True


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
