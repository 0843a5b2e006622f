"""Who takes part in which round: joins, deaths, late ones. No sockets, no threads, no numbers.

    joined    some of its ranks are there         -> waits
    ready     all are                             -> waits for the round to end
    active    it trains from this round's theta   -> has sent, when all its ranks have
    gone      it left, or a stream of it broke

A round is over when every active member has sent or has gone, and one at least has sent. Then
those that are ready become active, with the others. Where nobody is active they do at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.errors import ConfigError


@dataclass(slots=True, eq=False)
class Member:
    """A replica, as long as its streams last."""

    name: str
    world: int
    seed: int
    ranks: set[int] = field(default_factory=set)  # that are there
    sent: set[int] = field(default_factory=set)  # that have sent in this round
    is_active: bool = False
    is_gone: bool = False

    @property
    def is_ready(self) -> bool:
        return len(self.ranks) == self.world

    @property
    def has_sent(self) -> bool:
        return len(self.sent) == self.world


class Rounds:
    """`number`: of the round that goes on; `at_least`: members with which the first one begins."""

    def __init__(self, number: int, at_least: int) -> None:
        self.number, self._at_least = number, at_least
        self.members: dict[str, Member] = {}
        self.has_begun = False

    @property
    def active(self) -> list[Member]:
        """In the order of their names, so that sums have one order."""
        return sorted((m for m in self.members.values() if m.is_active), key=lambda m: m.name)

    def join(self, name: str, rank: int, world: int, seed: int) -> Member:
        """ConfigError where it cannot; the text goes to who asked."""
        if not 0 <= rank < world:
            raise ConfigError(f"replicas.name: {name!r} has no rank {rank} of {world}")
        member = self.members.get(name)
        if member is None:
            for other in self.members.values():
                if other.seed == seed:
                    raise ConfigError(
                        f"run.seed: {seed} is also that of replica {other.name!r}: both would read "
                        "the same samples; choose another"
                    )
            member = self.members[name] = Member(name, world, seed)
        elif rank in member.ranks:
            raise ConfigError(
                f"replicas.name: a replica {name!r} is there already; choose another name"
            )
        if (world, seed) != (member.world, member.seed):
            raise ConfigError(
                f"replicas.name: {name!r} has {member.world} ranks and seed {member.seed}, not "
                f"rank {rank} of {world} with seed {seed}; choose another name"
            )
        member.ranks.add(rank)
        self._begin()
        return member

    def leave(self, member: Member) -> None:
        """It has gone. What it sent in this round counts no more."""
        member.is_gone, member.is_active = True, False
        if self.members.get(member.name) is member:
            del self.members[member.name]
        self._begin()

    def _begin(self) -> None:
        """Where nobody trains, those that are ready do."""
        ready = [m for m in self.members.values() if m.is_ready]
        if self.active or (not self.has_begun and len(ready) < self._at_least) or not ready:
            return
        self.has_begun = True
        for member in ready:
            member.is_active, member.sent = True, set()

    def send(self, member: Member, rank: int) -> bool:
        """A rank's part of this round has arrived; False where its member does not take part any
        more."""
        if not member.is_active:
            return False
        member.sent.add(rank)
        return True

    def drop_late(self) -> list[Member]:
        """Active ones that have not sent: they wait for the next round."""
        late = [m for m in self.active if not m.has_sent]
        for member in late:
            member.is_active, member.sent = False, set()
        return late

    @property
    def is_over(self) -> bool:
        return bool(self.active) and all(m.has_sent for m in self.active)

    def advance(self) -> None:
        """The next round, with all that are ready."""
        self.number += 1
        for member in self.members.values():
            member.is_active, member.sent = member.is_ready, set()
