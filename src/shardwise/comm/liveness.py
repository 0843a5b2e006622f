"""Which process a rank is, and whether it still runs: what the ranks of one machine see in /proc.

A rank that was killed says nothing, and one that is stopped says nothing either; who waits for it
would look at the branches of its own program. So each rank shows a card, and who waits long looks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["runs", "stopped", "ended", "unknown"]
_ENDED, _STOPPED = "ZXx", "Tt"


@dataclass(frozen=True, slots=True)
class Process:
    """`place` are the machine's boot and the namespace of `pid`; a process id is used again, but
    not with the same start."""

    place: str
    pid: int
    start: str

    @classmethod
    def own(cls) -> Process:
        try:
            return cls(_place(), os.getpid(), _stat(os.getpid())[1])
        except OSError:  # no /proc here
            return cls("", os.getpid(), "")

    @classmethod
    def of(cls, card: str) -> Process:
        place, pid, start = card.split(" ")
        return cls(place, int(pid), start)

    @property
    def card(self) -> str:
        return f"{self.place} {self.pid} {self.start}"

    @property
    def state(self) -> State:
        try:
            if not self.place or self.place != _place():
                return "unknown"
            letter, start = _stat(self.pid)
        except FileNotFoundError:
            return "ended"
        except OSError:
            return "unknown"
        if start != self.start or letter in _ENDED:
            return "ended"
        return "stopped" if letter in _STOPPED else "runs"


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> tuple[str, str]:
    """State and start of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
