"""Memory of a whole job: the PSS of all its processes, sampled while it runs.

PSS (proportional set size, /proc/PID/smaps_rollup) divides shared pages among the processes that
map them, so that its sum over ranks counts memory that ranks share once. RSS would count it once
for each rank. No privileges needed, and no process is moved to another cgroup.

A memory cgroup (`MemoryCgroup`) counts the same, and what the kernel holds for the job. It is used
only where the user names a folder of the cgroup file system that rank processes may move into.

Sampling takes the kernel some ms for each GB (it walks the page tables) and slows the job down, so
times are never taken while a sampler runs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shardwise.errors import ConfigError

INTERVAL_S = 0.01
_FIELDS = {
    b"Pss:": "total",
    b"Pss_Anon:": "anonymous",
    b"Pss_Shmem:": "shared",
    b"Pss_File:": "file",
}


@dataclass(slots=True)
class Pss:
    """Bytes: private memory, memfd and other shared memory, pages of files (libraries)."""

    total: int = 0
    anonymous: int = 0
    shared: int = 0
    file: int = 0

    @classmethod
    def of(cls, pid: int) -> Pss:
        """PSS of a process now; zeros when it has ended."""
        found = cls()
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return found
        for line in text.splitlines():
            words = line.split()
            field = _FIELDS.get(words[0])
            if field is not None:
                setattr(found, field, int(words[1]) * 1024)
        return found

    def __add__(self, other: Pss) -> Pss:
        return Pss(
            self.total + other.total,
            self.anonymous + other.anonymous,
            self.shared + other.shared,
            self.file + other.file,
        )


class PssSampler:
    """Peak of the sum over `pids`, and of each of them, while the context is open."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self.peak = Pss()
        self.peak_of: dict[int, Pss] = {pid: Pss() for pid in pids}
        self.num_samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PssSampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            total = Pss()
            for pid in self.pids:
                one = Pss.of(pid)
                if one.total > self.peak_of[pid].total:
                    self.peak_of[pid] = one
                total = total + one
            if total.total > self.peak.total:
                self.peak = total
            self.num_samples += 1
            time.sleep(INTERVAL_S)


class MemoryCgroup:
    """A child of the cgroup `parent`, made for one job and removed after it.

    Version 2 has the highest use in `memory.peak`, version 1 in `memory.max_usage_in_bytes`. Rank
    processes move in themselves, before they allocate: `path` is where.
    """

    _PEAKS = ("memory.peak", "memory.max_usage_in_bytes")

    def __init__(self, parent: str) -> None:
        self.path = Path(parent) / f"shardwise-bench-{os.getpid()}"

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--cgroup: cannot make a group in {self.path.parent}: {error.strerror}; name a "
                "folder of the memory cgroup that you may write to, or leave it out (summed PSS)"
            ) from None
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # a process that is still ending: it stays, empty
            self.path.rmdir()

    def peak(self) -> Pss:
        """The highest use so far; only the total is known."""
        for name in self._PEAKS:
            with contextlib.suppress(FileNotFoundError):
                return Pss(total=int((self.path / name).read_text()))
        raise ConfigError(
            f"--cgroup: {self.path.parent} counts no peak of memory (neither of "
            f"{', '.join(self._PEAKS)}); the memory controller has to be on in it"
        )
