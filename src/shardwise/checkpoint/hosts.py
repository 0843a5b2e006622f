"""Ranks by host, where a host is all ranks that see one folder of memory.

    hosts         [0 1 2 3]  [4 5 6 7]  [8 9 10 11]
    neighbour_of    4 5 6 7   8 9 ..      0 1 2 3       who keeps a second copy of a rank's file

Names of machines would not do: containers of one machine may each have a /dev/shm of their own. A
directory that all ranks share, like that of the checkpoints on disk, is one host of all ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shardwise.checkpoint.files import text_of
from shardwise.checkpoint.ranks import Ranks

_T = TypeVar("_T")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Hosts:
    """Groups of ranks, ordered by their lowest rank, which leads the group."""

    ranks: Ranks
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def sharing_all(cls, ranks: Ranks) -> Hosts:
        """One directory for all ranks."""
        return cls(ranks, (tuple(range(ranks.world_size)),))

    @classmethod
    def by_folder(cls, ranks: Ranks, folder: Path) -> Hosts:
        """Ranks for which `folder`, which must exist, is the same one. Collective."""
        groups: dict[str, list[int]] = {}
        for rank, identity in enumerate(ranks.on_all(lambda: _identity(folder))):
            groups.setdefault(identity, []).append(rank)
        return cls(ranks, tuple(tuple(group) for group in groups.values()))

    @property
    def own(self) -> int:
        """The number of this rank's host."""
        return next(i for i, group in enumerate(self.groups) if self.ranks.rank in group)

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return self.groups[self.own]

    @property
    def leads(self) -> bool:
        return self.ranks.rank == self.group[0]

    def on_leaders(self, action: Callable[[], _T]) -> list[_T]:
        """Runs once on each host; all ranks get the results of all hosts, or the first error."""
        found = self.ranks.on_all(lambda: action() if self.leads else None)
        return [found[group[0]] for group in self.groups]  # type: ignore[misc]

    def neighbour_of(self, rank: int) -> int | None:
        """The rank of the next host to which a copy of this rank's file goes; None where there is
        one host only."""
        if len(self.groups) == 1:
            return None
        host = next(i for i, group in enumerate(self.groups) if rank in group)
        following = self.groups[(host + 1) % len(self.groups)]
        return following[self.groups[host].index(rank) % len(following)]

    def kept_on(self, host: int) -> list[int]:
        """The ranks whose files a host holds: its own, and those of the host before it."""
        group = self.groups[host]
        ranks = range(self.ranks.world_size)
        return [r for r in ranks if r in group or self.neighbour_of(r) in group]


def _identity(folder: Path) -> str:
    found = folder.stat()
    return f"{text_of(_BOOT_ID) or socket.gethostname()} {found.st_dev} {found.st_ino}"
