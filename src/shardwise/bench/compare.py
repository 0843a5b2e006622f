"""All engines on one workload: timed rounds in turns, then what they communicate, then memory.

The floor's turn is the first. An engine that fails becomes a row that says so; the others go on.
When the time limit comes near, no further round is begun, and all rows have the same number of
rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from rich.console import Console

from shardwise.bench import machine
from shardwise.bench.engines import EngineSpec
from shardwise.bench.group import Deadline, EngineFailed, RankGroup, Steps, TimeIsUp
from shardwise.bench.memory import MemoryCgroup, Pss, PssSampler
from shardwise.bench.rank import Facts, Job
from shardwise.bench.rows import Comparison, Row
from shardwise.bench.workload import Precision, Workload
from shardwise.units import counted

NUM_MEMORY_STEPS = 2  # the optimizer makes its state in the first


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured, on what."""

    workload: Workload
    precision: Precision
    specs: tuple[EngineSpec, ...]
    num_ranks: int = 2
    num_micro_batches: int = 1
    num_rounds: int = 5  # 0: the memory pass alone, whose steps also give the loss
    num_steps: int = 5
    num_warmup: int = 2
    num_threads: int = 1
    optimizer: str = "fused"
    lr: float = 3e-4
    with_memory: bool = True
    cgroup: str = ""  # a folder of the memory cgroup to measure in; empty: summed PSS
    processes: Literal["auto", "keep", "fresh"] = "auto"

    def job(self, spec: EngineSpec) -> Job:
        return Job(
            spec=spec,
            workload=self.workload,
            precision=self.precision,
            num_ranks=self.num_ranks,
            num_micro_batches=self.num_micro_batches,
            optimizer=self.optimizer,
            lr=self.lr,
            num_threads=self.num_threads,
        )


def compare(plan: Plan, console: Console, deadline: Deadline) -> Comparison:
    """Measure every engine of the plan."""
    return _Study(plan, console, deadline).run()


class _Study:
    def __init__(self, plan: Plan, console: Console, deadline: Deadline) -> None:
        self.plan, self.console, self.deadline = plan, console, deadline
        self.rows = [Row(spec) for spec in plan.specs]
        self.result = Comparison(
            workload=plan.workload.name,
            items=plan.workload.items,
            precision=plan.precision,
            num_ranks=plan.num_ranks,
            num_micro_batches=plan.num_micro_batches,
            rows=self.rows,
        )
        self.groups: dict[EngineSpec, RankGroup] = {}
        self.keep = plan.processes != "fresh"

    def run(self) -> Comparison:
        for row in self.rows:
            if row.engine.missing:
                row.problem, row.error = "not installed", row.engine.missing
        try:
            self._rounds()
        finally:
            for group in self.groups.values():
                group.kill()
        if self.plan.with_memory:
            for row in self._alive():
                self._guarded(row, lambda row=row: self._memory(row))
        return self.result

    def _alive(self) -> list[Row]:
        return [row for row in self.rows if not row.problem]

    def _turns(self) -> list[Row]:
        """The floor first: where time runs out in a round, the others can be compared with it."""
        return sorted(self._alive(), key=lambda row: row.engine.trains)

    def _rounds(self) -> None:
        longest_s = 0.0
        for number in range(self.plan.num_rounds):
            if number and longest_s > self.deadline.left_s:
                left_out = self.plan.num_rounds - number
                self.console.print(f"time limit: {counted(left_out, 'round')} at the end left out")
                break
            started_s = time.monotonic()
            for row in self._turns():
                self._guarded(row, lambda row=row, number=number: self._round(row, number))
            longest_s = max(longest_s, time.monotonic() - started_s)
            self._report(number)
        for row in self._alive():
            if row.engine in self.groups:
                self._guarded(row, lambda row=row: self._traffic(row, self.groups[row.engine]))

    def _round(self, row: Row, number: int) -> None:
        """One engine's turn."""
        num_steps = self.plan.num_steps
        if row.engine in self.groups:
            num_done = self.plan.num_warmup + (number + 1) * num_steps
            row.add_round(self.groups[row.engine].run(num_steps), num_done)
            return
        group = self._start(row)
        self.groups[row.engine] = group  # so that it is ended, whatever happens
        self.result.facts = group.wait_ready()
        group.run(self.plan.num_warmup)
        if number == 0 and self.plan.processes == "auto" and self.keep:
            self.keep = self._all_fit(group)
        row.add_round(group.run(num_steps), self.plan.num_warmup + num_steps)
        if not self.keep:
            if number == 0:
                self._traffic(row, group)
            group.close()
            del self.groups[row.engine]

    def _traffic(self, row: Row, group: RankGroup) -> None:
        row.traffic = group.traffic()

    def _memory(self, row: Row) -> None:
        """Peak from the first step on, in a group that is alone on the machine."""
        if self.plan.cgroup:
            with (
                MemoryCgroup(self.plan.cgroup) as cgroup,
                self._start(row, str(cgroup.path)) as group,
            ):
                facts = group.wait_ready()
                steps = group.run(NUM_MEMORY_STEPS)
                row.memory = cgroup.peak()
                self._from_memory_pass(row, group, facts, steps)
            return
        with self._start(row) as group:
            facts = group.wait_ready()
            with PssSampler(group.pids) as sampler:
                steps = group.run(NUM_MEMORY_STEPS)
            row.memory = sampler.peak if sampler.peak.total else None
            self._from_memory_pass(row, group, facts, steps)

    def _from_memory_pass(self, row: Row, group: RankGroup, facts: Facts, steps: Steps) -> None:
        """What no timed round has told: its steps were sampled, so their times are not kept."""
        if not self.plan.num_rounds:
            self.result.facts = facts
            row.losses.append((NUM_MEMORY_STEPS, steps.loss))
            self._traffic(row, group)
            self.console.print(f"{row.engine.name} measured", style="dim", markup=False)

    def _start(self, row: Row, cgroup: str = "") -> RankGroup:
        return RankGroup(replace(self.plan.job(row.engine), cgroup=cgroup), self.deadline)

    def _all_fit(self, group: RankGroup) -> bool:
        """Whether all engines' groups can be alive together; they keep what this one holds now,
        or as much as weights, gradients and moments at most.
        """
        assert self.result.facts is not None
        now = sum((Pss.of(pid).total for pid in group.pids), 0)
        states = self.plan.num_ranks * (16 * self.result.facts.num_params + 300 * 2**20)
        fits = len(self._alive()) * max(now, states) < 0.6 * (machine.available_bytes() + now)
        if not fits:
            self.console.print("not enough memory for all at once: processes are started anew")
        return fits

    def _guarded(self, row: Row, measure: Callable[[], None]) -> None:
        if row.problem:
            return
        try:
            if not self.deadline.left_s:
                raise TimeIsUp("the time limit was reached before its turn")
            measure()
        except EngineFailed as error:
            if group := self.groups.pop(row.engine, None):
                group.kill()  # it may be well, and wait for a command
            row.error = str(error)
            if isinstance(error, TimeIsUp):
                row.problem = "" if row.rounds else "no time"
                return
            row.problem = "refused" if row.engine.is_foreign and not row.rounds else "failed"
            self.console.print(f"{row.engine.name} {row.problem}: {error}", markup=False)
            if error.details and row.problem == "failed":
                self.console.print(error.details, markup=False, highlight=False, style="dim")

    def _report(self, number: int) -> None:
        parts = [f"{r.engine.name} {min(r.rounds[-1]) * 1e3:.0f}" for r in self._alive()]
        if not parts:
            return
        self.console.print(
            f"round {number + 1}, fastest step in ms: {', '.join(parts)}", style="dim", markup=False
        )
