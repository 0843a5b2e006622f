"""What a run leaves for those who look at it afterwards, beside metrics.jsonl. Rank 0 writes.

log.jsonl      a row for each start, evaluation, save and end: what it was, and how long it took
ranks.jsonl    a row a step, each number a list over the ranks (`watch`); of many ranks a row every
               so many steps, so that the file grows no faster than metrics.jsonl
warnings/      what a rank was warned of, in a file of its own that its first warning makes
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.core.state import sharded_units
from shardwise.train.metrics import MetricsFile, read_metrics
from shardwise.train.watch import NAMES

LOG, RANKS, WARNINGS = "log.jsonl", "ranks.jsonl", "warnings"
_FULL_RANKS = 8  # with more the row of a step is written less often
_DIGITS = 6


class Record:
    """Opened on rank 0 at the start of a job; `step`: after it the job goes on."""

    def __init__(self, directory: Path, step: int, num_ranks: int) -> None:
        self._log = (directory / LOG).open("a", encoding="utf-8")
        self._ranks = MetricsFile(directory / RANKS, step)
        self._every = max(1, num_ranks // _FULL_RANKS)
        self._graphs = 0  # of torch.compile
        self.step = step

    def event(self, name: str, **values: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        row = {"event": name, "at": now, "step": self.step, **values}
        self._log.write(json.dumps(row) + "\n")
        self._log.flush()

    def compiled(self, graphs: int, seconds: float) -> None:
        """What `torch.compile` has made so far, where a step made more."""
        if graphs != self._graphs:
            self._graphs = graphs
            self.event("compiled", graphs=graphs, seconds=round(seconds, _DIGITS))

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.event(name, seconds=round(time.perf_counter() - began, _DIGITS))

    def ranks(self, step: int, losses: Tensor, memory: Tensor, watched: Tensor) -> None:
        """The numbers of each rank: losses [ranks], peak bytes [ranks], of `NAMES` [ranks, 5]."""
        self.step = step
        if step % self._every:
            return
        row: dict[str, Any] = {"step": step, "loss": losses.tolist()}
        row["peak_memory_bytes"] = [int(value) for value in memory.tolist()]
        for name, column in zip(NAMES, watched.unbind(1), strict=True):
            values = column.tolist()
            row[name] = [int(v) if name == "batch" else round(v, _DIGITS) for v in values]
        with contextlib.suppress(ValueError):  # a loss that is no number: the end says so
            self._ranks.write(row)

    def close(self) -> None:
        self._log.close()
        self._ranks.close()


class Warned(logging.Handler):
    """On every rank: warnings of shardwise's loggers. A disk that takes none is no trouble."""

    def __init__(self, directory: Path, rank: int) -> None:
        super().__init__(logging.WARNING)
        self._path = directory / WARNINGS / f"rank_{rank:05d}.log"

    def emit(self, record: logging.LogRecord) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{now} {' '.join(record.getMessage().split())}\n")

        self._show(record)

    @staticmethod
    def _show(record: logging.LogRecord) -> None:
        """On stderr, where Python shows what no handler takes: with this one it would not."""
        loggers = logging.getLogger("shardwise"), logging.getLogger()
        others = [h for each in loggers for h in each.handlers if not isinstance(h, Warned)]
        if not others and logging.lastResort is not None:
            logging.lastResort.handle(record)

    def __enter__(self) -> None:
        logging.getLogger("shardwise").addHandler(self)

    def __exit__(self, *error: object) -> None:
        logging.getLogger("shardwise").removeHandler(self)


def start_facts(model: nn.Module, device: torch.device, num_ranks: int) -> dict[str, Any]:
    """What a look at the run needs that its configuration does not say."""
    units = [
        {"name": unit.name, "gathered_bytes": sum(b.layout.full_bytes for b in unit.buckets)}
        for unit in sharded_units(model)
    ]
    return {
        "ranks": num_ranks,
        "device": device.type,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "buffer_bytes": sum(b.numel() * b.element_size() for b in model.buffers()),
        "units": units,
    }


def read_log(path: Path) -> list[dict[str, Any]]:
    """Rows of log.jsonl, whole ones alone."""
    return [row for row in read_metrics(path) if isinstance(row.get("event"), str)]
