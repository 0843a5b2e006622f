"""Rank groups that measure nothing, so that what is made of measurements can be tested."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from shardwise.bench.group import EngineFailed, Steps
from shardwise.bench.rank import Facts, Job


@dataclass
class FakeGroups:
    """Stands for the class `RankGroup`; `behaviour` says what an engine's group does."""

    behaviour: dict[str, dict[str, Any]] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def __call__(self, job: Job, deadline: Any = None) -> FakeGroup:
        self.started.append(job.spec.name)
        group = FakeGroup(job, self, {"step_s": 0.1, "loss": 2.0} | self.of(job.spec.name))
        self.alive.append(group)
        return group

    def of(self, name: str) -> dict[str, Any]:
        return self.behaviour.get(name, {})


class FakeGroup:
    def __init__(self, job: Job, home: FakeGroups, does: dict[str, Any]) -> None:
        self.job, self.home, self.does = job, home, does
        self.pids = [os.getpid()]

    def wait_ready(self) -> Facts:
        if "start_error" in self.does:
            self.kill()
            raise self.does["start_error"]
        return Facts(1000, 64)

    def run(self, num_steps: int) -> Steps:
        if "run_error" in self.does:
            self.kill()
            raise self.does["run_error"]
        one = [self.does["step_s"]] * num_steps
        return Steps(one, one, [0.01] * num_steps, self.does["loss"])

    def traffic(self) -> dict[str, int]:
        return {"total_bytes": 8, "num_gathers": 2}

    def kill(self) -> None:
        if self in self.home.alive:
            self.home.alive.remove(self)

    close = kill

    def __enter__(self) -> FakeGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def broken(line: str = "RuntimeError: no such thing") -> EngineFailed:
    return EngineFailed(line, "Traceback: ...")
