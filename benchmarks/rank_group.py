"""One engine's ranks, as processes that the benchmark starts, drives and ends.

A group that is not driven is blocked in a read and takes no processor time, so groups of several
engines may be alive together and take turns.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean
from typing import Any

from rank_main import Job, run_rank

STEP_LIMIT_S = 600.0


class EngineFailed(RuntimeError):  # noqa: N818 - it is a result, one row of the table
    """A rank ended or raised; the text is its traceback."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Wall time and processor time (all threads of a rank) of each step; loss of the last."""

    elapsed_s: list[float]
    cpu_s: list[float]
    loss: float


class RankGroup:
    """The rank processes of one job."""

    def __init__(self, job: Job) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-bench-")
        self.job = replace(job, rendezvous=str(Path(self._folder.name) / "rendezvous"))
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        with _environment(job.environment):
            for rank in range(job.num_ranks):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=run_rank, args=(rank, self.job, theirs), daemon=True
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait_ready(self) -> None:
        self._answers()

    def run(self, num_steps: int) -> Steps:
        """Run steps; what comes back are means over the ranks.

        The mean, not the slowest: for engines that wait for each other it is the same, and the
        floor's ranks do not wait.
        """
        for pipe in self._pipes:
            pipe.send(("steps", num_steps))
        answers = self._answers()
        elapsed_s, cpu_s = (
            [fmean(step) for step in zip(*(a[i] for a in answers), strict=True)] for i in (1, 2)
        )
        return Steps(elapsed_s, cpu_s, fmean(a[3] for a in answers))

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answers(self) -> list[Any]:
        """One answer from every rank; the first error ends the group."""
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._pipes):
            ready = wait([p for p in self._pipes if p not in answers], timeout=STEP_LIMIT_S)
            if not ready:
                self._kill(f"no answer within {STEP_LIMIT_S:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answer = pipe.recv()
                except (EOFError, ConnectionError):
                    answer = ("error", "a rank process ended without a word")
                if answer[0] == "error":
                    self._kill(answer[1])
                answers[pipe] = answer
        return [answers[pipe] for pipe in self._pipes]

    def _kill(self, reason: str) -> None:
        for process in self._processes:
            process.kill()
        raise EngineFailed(f"{self.job.engine}: {reason}")


@contextlib.contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    """What children start with: one computing thread per rank, and the engine's own variables."""
    wanted = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **extra}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
