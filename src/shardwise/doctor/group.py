"""The rank processes of one number of ranks: started, asked, killed."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from shardwise.doctor.plan import Plan

ANSWER_S = 300.0  # a rank that says nothing for so long hangs


class RanksFailed(RuntimeError):  # noqa: N818 - it is a result, one row of the table
    """A rank raised, ended or hangs: one line."""


class Group:
    """Processes that run `rank.serve`; ends with this one, however that ends."""

    def __init__(self, plan: Plan, num_ranks: int) -> None:
        from shardwise.doctor.rank import serve

        self.num_ranks = num_ranks
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-verify-")
        meeting = str(Path(self._folder.name) / "meeting")
        os.environ["OMP_NUM_THREADS"] = "1"
        # Memory of one variant must not stay for the next; a wait this long is an error.
        os.environ.setdefault("SHARDWISE_WARM_PAGES", "0")
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            args = (rank, num_ranks, plan, theirs, meeting)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def ask(self, *command: Any) -> list[Any]:
        """The answers of all ranks to one command; RanksFailed at the first error."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(command)
            except OSError:
                raise self._failed(f"rank {rank} has ended") from None
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + ANSWER_S
        while len(answers) + len(errors) < self.num_ranks:
            open_ = {p: r for r, p in enumerate(self._pipes) if r not in answers | errors}
            # After one error the others follow soon, mostly with the reason that names both sides.
            left = min(deadline - time.monotonic(), 5.0 if errors else ANSWER_S)
            ready = wait(list(open_), timeout=max(0.0, left))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._receive(pipe, open_[pipe], answers, errors)
        if errors:
            rank = min(errors, key=lambda r: (_is_consequence(errors[r]), r))
            raise self._failed(f"rank {rank}: {errors[rank]}")
        if len(answers) < self.num_ranks:
            silent = sorted(set(range(self.num_ranks)) - answers.keys())
            raise self._failed(f"ranks {silent} hang: no answer within {ANSWER_S:.0f} s")
        return [answers[rank] for rank in range(self.num_ranks)]

    @staticmethod
    def _receive(
        pipe: Connection, rank: int, answers: dict[int, Any], errors: dict[int, str]
    ) -> None:
        try:
            kind, value = pipe.recv()
        except (EOFError, ConnectionError):
            errors[rank] = "the process ended without a word"
            return
        if kind == "error":
            errors[rank] = value
        else:
            answers[rank] = value

    def _failed(self, text: str) -> RanksFailed:
        self.kill()
        return RanksFailed(text)

    def kill(self) -> None:
        """Ends all ranks at once, as `kill -9` does."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _is_consequence(error: str) -> bool:
    """Of another rank's error: what ranks say that lost one."""
    kinds = ("TransportError", "PeerTimeoutError", "DivergenceError")
    return error.startswith(kinds) or "closed by peer" in error
