"""How fast this machine moves bytes: copies in memory, writes to a disk; and what its ranks reach.

Bandwidths are the best of some repetitions: what the machine can do, not what else was running.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.doctor.machine.collectives import Collective
from shardwise.doctor.machine.ranks import Compute, measure_ranks
from shardwise.errors import ConfigError

_COPIED = 2**28
_WRITTEN = 2**27
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes per second, and what ranks reach side by side."""

    copy: float
    disk_write: float
    compute: Compute
    collectives: tuple[Collective, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(folder: Path, ranks: int = 2) -> Measured:
    """Takes about a minute; writes to `folder` and takes it away again."""
    return Measured(copy_bandwidth(), disk_bandwidth(folder), *measure_ranks(ranks))


def _best(action: Callable[[], object], repeats: int = _REPEATS) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def copy_bandwidth() -> float:
    """Of memory, by one thread: bytes that are copied in a second."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source = torch.ones(_COPIED, dtype=torch.uint8)
        target = torch.empty_like(source)
        target.copy_(source)
        return _COPIED / _best(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(before)


def disk_bandwidth(folder: Path) -> float:
    """Of one file that is written and synced."""
    data = os.urandom(2**20)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shardwise-doctor-") as file:

            def write() -> None:
                file.seek(0)
                for _ in range(_WRITTEN // len(data)):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())

            return _WRITTEN / _best(write, 2)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
