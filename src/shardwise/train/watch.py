"""What a rank's step is made of, until its backward has ended: taken on every rank, at next to no
cost.

    busy_s      the main thread ran
    data_s      reading samples, wall time
    queue_s     ready to run, and another thread had the core (Linux)
    waiting_s   the rest of the time in which the main thread did not run: for other ranks. Only on
                CPU; a device's work goes on while its host waits
    batch       a checksum of the first samples: ranks that read the same ones show

They travel with the numbers that ranks exchange once a step anyway.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.train.data import Samples
from shardwise.train.order import Int64Array

NAMES = ("busy_s", "data_s", "waiting_s", "queue_s", "batch")
_SUMMED = 2**16  # bytes of a tensor that its checksum covers
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Watch:
    """Of one rank; `begin` starts a step, `over` gives samples that are watched."""

    def __init__(self, device: torch.device) -> None:
        self._is_host = device.type == "cpu"
        self.begin()

    def begin(self) -> None:
        self._data_s, self._data_idle_s, self._sum = 0.0, 0.0, 0
        self._queued_s = _queued_s()
        self._began = time.perf_counter(), time.thread_time()

    def numbers(self) -> list[float]:
        """Of the step so far, in the order of NAMES."""
        wall_s = time.perf_counter() - self._began[0]
        busy_s = time.thread_time() - self._began[1]
        queue_s = _queued_s() - self._queued_s
        waiting_s = max(0.0, wall_s - busy_s - queue_s - self._data_idle_s)
        waiting_s = waiting_s if self._is_host else 0.0
        return [busy_s, self._data_s, waiting_s, queue_s, float(self._sum)]

    def over(self, samples: Samples) -> Samples:
        return _Watched(samples, self)

    def read(self, samples: Samples, indices: Int64Array) -> Any:
        began = time.perf_counter(), time.thread_time(), _queued_s()
        batch = samples.batch(indices)
        wall_s = time.perf_counter() - began[0]
        idle_s = wall_s - (time.thread_time() - began[1]) - (_queued_s() - began[2])
        self._data_s += wall_s
        self._data_idle_s += max(0.0, idle_s)
        self._sum = self._sum or checksum(batch)
        return batch


class _Watched:
    """Samples whose reading is timed."""

    def __init__(self, samples: Samples, watch: Watch) -> None:
        self._samples, self._watch = samples, watch

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Int64Array) -> Any:
        return self._watch.read(self._samples, indices)

    def trained_tokens(self, indices: Int64Array) -> int | None:
        return self._samples.trained_tokens(indices)


def checksum(batch: Any) -> int:
    """Of the first bytes of each tensor of a batch; 0 where there is none."""
    found = 0
    values = batch.values() if isinstance(batch, dict) else batch
    for value in values if isinstance(batch, dict | list | tuple) else [batch]:
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel():
            first = value.detach().flatten()[: _SUMMED // value.element_size() or 1]
            found = zlib.crc32(first.contiguous().view(torch.uint8).numpy().data, found)
    return found


def _queued_s() -> float:
    """What this thread has waited for a core, all its life; 0 where the kernel does not count."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_SCHEDSTAT.read_text().split()[1]) * 1e-9
    return 0.0
