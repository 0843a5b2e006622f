"""One engine's ranks, as processes that the benchmark starts, drives and ends.

A group that is not driven is blocked in a read and takes no processor time, so groups of several
engines may be alive together and take turns.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwise.bench.rank import Facts, Job, run_rank
from shardwise.errors import ConfigError

STEP_LIMIT_S = 600.0


class EngineFailed(RuntimeError):  # noqa: N818 - it is a result, one row of the table
    """A rank ended or raised: one line, and the traceback."""

    def __init__(self, line: str, details: str = "") -> None:
        super().__init__(line)
        self.details = details


class TimeIsUp(EngineFailed):
    """The benchmark's own limit was reached."""


class Deadline:
    """When the whole benchmark has to end; 0 seconds: never."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s if limit_s else float("inf")

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class Steps:
    """Of each step the wall time, the processor time (all threads of a rank), the time in which the
    rank's main thread did not run; the loss of the last step.
    """

    elapsed_s: list[float]
    cpu_s: list[float]
    waiting_s: list[float]
    loss: float


class RankGroup:
    """The rank processes of one job."""

    def __init__(self, job: Job, deadline: Deadline | None = None) -> None:
        self._deadline = deadline or Deadline(0)
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-bench-")
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        self.job = replace(job, rendezvous=rendezvous)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        context = multiprocessing.get_context("spawn")
        try:
            with _environment(dict(job.spec.environment), job.num_threads), _no_interrupts():
                for rank in range(job.num_ranks):
                    ours, theirs = context.Pipe()
                    args = (rank, self.job, os.getpid(), theirs)
                    process = context.Process(target=run_rank, args=args, daemon=True)
                    self._processes.append(process)
                    self._pipes.append(ours)
                    process.start()
                    theirs.close()
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait_ready(self) -> Facts:
        return self._answers()[0][1]

    def run(self, num_steps: int) -> Steps:
        """Run steps; what comes back are means over the ranks.

        The mean, not the slowest: for engines that wait for each other it is the same, and the
        floor's ranks do not wait.
        """
        answers = self._ask(("steps", num_steps))
        elapsed_s, cpu_s, waiting_s = (
            [fmean(step) for step in zip(*(a[i] for a in answers), strict=True)] for i in (1, 2, 3)
        )
        return Steps(elapsed_s, cpu_s, waiting_s, fmean(a[4] for a in answers))

    def traffic(self) -> dict[str, int]:
        """What one more step communicates, a mean over the ranks."""
        answers = [answer[1] for answer in self._ask(("traffic",))]
        return {key: round(fmean(a[key] for a in answers)) for key in answers[0]}

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            if process.pid is not None:
                process.join(timeout=10)
        self.kill()

    def kill(self) -> None:
        """End the ranks at once."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                process.kill()
        for process in self._processes:
            if process.pid is not None:
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _ask(self, command: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(command)
        return self._answers()

    def _answers(self) -> list[Any]:
        """One answer from every rank; the first error ends the group."""
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._pipes):
            limit_s = min(STEP_LIMIT_S, self._deadline.left_s)
            ready = wait([p for p in self._pipes if p not in answers], timeout=limit_s)
            if not ready:
                self.kill()
                if limit_s < STEP_LIMIT_S:
                    raise TimeIsUp("the time limit was reached before it had an answer")
                raise EngineFailed(f"no answer within {STEP_LIMIT_S:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answers[pipe] = self._receive(pipe)
        return [answers[pipe] for pipe in self._pipes]

    def _receive(self, pipe: Connection) -> Any:
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionError):
            code = self._exit_code(self._pipes.index(pipe))
            self.kill()
            raise EngineFailed(f"a rank process ended without a word (exit code {code})") from None
        if answer[0] == "mistake":
            self.kill()
            raise ConfigError(answer[1])
        if answer[0] == "error":
            self.kill()
            raise EngineFailed(answer[1], answer[2])
        return answer

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(timeout=5)
        return self._processes[rank].exitcode


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Children inherit that Ctrl-C does not reach them, from their first moment: it is our matter.

    Here it is delivered when the context ends, so that no half-started group is forgotten.
    """
    resource_tracker.ensure_running()  # its start would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(extra: dict[str, str], num_threads: int) -> Iterator[None]:
    """What children start with: their number of threads, and the engine's own variables."""
    threads = str(num_threads)
    wanted = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **extra}
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
