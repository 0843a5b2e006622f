"""Which packed rows the ranks of a job read, in which step: for finetune_ranks.py.

    run_as_rank(note, words)   one rank of `shardwise train`, which notes what it reads
    ReadRows                   what the ranks of all starts of a run have noted

A rank reads equally many rows in each step, one micro-batch after the other: so the number of those
before tells the step.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


def run_as_rank(note: Path, words: list[str]) -> NoReturn:
    """Notes what the steps read of the part that is trained on: `note.RANK`, a JSON list a line."""
    from shardwise.train import job
    from shardwise.train.command import main
    from shardwise.train.text.samples import TextSamples

    file = f"{note}.{os.environ['RANK']}"
    begin, read, run_steps = TextSamples.__init__, TextSamples.batch, job.run_steps
    trained: list[Any] = []
    steps_run = False  # before, single rows are read to look at them

    def noting_init(self: Any, store: Any, part: str, seq_len: int) -> None:
        begin(self, store, part, seq_len)
        if part == "train":
            trained.append(self)
            Path(f"{file}.count").write_text(str(len(self)))

    def noting_batch(self: Any, indices: Any) -> Any:
        if steps_run and any(self is samples for samples in trained):
            with Path(file).open("a") as out:
                out.write(json.dumps(indices.tolist()) + "\n")
        return read(self, indices)

    def noting_steps(running: Any) -> str:
        nonlocal steps_run
        steps_run = True
        return run_steps(running)

    TextSamples.__init__ = noting_init  # type: ignore[method-assign]
    TextSamples.batch = noting_batch  # type: ignore[method-assign]
    job.run_steps = noting_steps
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass(frozen=True, slots=True)
class Rows:
    """What the ranks of one start have noted; it went on behind step `first`."""

    first: int
    num_ranks: int
    share: int  # rows that a rank reads in a step
    note: Path

    def of_rank(self, rank: int) -> list[int]:
        file = Path(f"{self.note}.{rank}")
        lines = file.read_text().splitlines() if file.exists() else []
        return [row for line in lines for row in json.loads(line)]

    def steps_begun(self) -> int:
        return -(-len(self.of_rank(0)) // self.share)


class ReadRows:
    """Of one run, whatever the number of its starts."""

    def __init__(self, folder: Path, name: str, global_batch: int = 4) -> None:
        self._folder, self._name, self._global_batch = folder, name, global_batch
        self._starts: list[Rows] = []

    def start(self, first: int, num_ranks: int) -> Rows:
        """For the ranks of the next start."""
        note = self._folder / f"{self._name}.{len(self._starts)}.rows"
        self._starts.append(Rows(first, num_ranks, self._global_batch // num_ranks, note))
        return self._starts[-1]

    @property
    def num_rows(self) -> int:
        return int(Path(f"{self._starts[0].note}.0.count").read_text())

    @property
    def num_reads(self) -> int:
        return sum(len(s.of_rank(rank)) for s in self._starts for rank in range(s.num_ranks))

    def by_step(self, steps: int) -> list[list[int]]:
        """The rows of each step; of a step that was done again, those of the last time."""
        found: list[list[int]] = [[] for _ in range(steps)]
        ends = [*(start.first for start in self._starts[1:]), steps]
        for start, end in zip(self._starts, ends, strict=True):
            for rank in range(start.num_ranks):
                rows = start.of_rank(rank)
                for step in range(start.first, end):
                    at = (step - start.first) * start.share
                    found[step] += rows[at : at + start.share]
        return [sorted(rows) for rows in found]

    def are_once_per_epoch(self, by_step: list[list[int]]) -> bool:
        """No row twice before all were read, and none left out of an epoch that is over."""
        count, size = self.num_rows, self._global_batch
        seen: Counter[int] = Counter()
        for step, rows in enumerate(by_step, start=1):
            seen.update(rows)
            epochs, more = divmod(step * size, count)
            numbers = [seen[row] for row in range(count)]
            if sum(numbers) != step * size or not set(numbers) <= {epochs, epochs + 1}:
                return False
            if numbers.count(epochs + 1) != more:
                return False
        return True
