"""metrics.jsonl: one row of JSON per step, floats printed so that they round-trip.

A resumed run does steps again that were done after its checkpoint: their rows are dropped first, so
that each step has one row. A last line cut by a kill is dropped too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shardwise.checkpoint.files import replace_file


class MetricsFile:
    """Appends rows; opened on rank 0 only."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        rows = read_metrics(path) if resumed_step else []
        kept = [row for row in rows if row["step"] <= resumed_step]
        lines = "".join(json.dumps(row) + "\n" for row in kept)
        if path.exists():
            replace_file(path, lines.encode())
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """To the disk: before a checkpoint commits, the rows of its steps must be there."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that a run may still be writing, or was killed while writing."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
