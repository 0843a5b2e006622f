"""Results: a row for each engine, a comparison of rows on one workload; medians, ratios, validity.

A row's state: `ok`; `INVALID` (it does not train the same model); `failed`; `refused` (somebody
else's engine does not run on this machine); `not installed`; `no time`.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from shardwise.bench.engines import EngineSpec
from shardwise.bench.group import Steps
from shardwise.bench.memory import Pss
from shardwise.bench.rank import Facts
from shardwise.units import counted

# How far losses may lie apart, relative: fp32 engines differ in the order of sums only; under bf16
# DDP computes by autocast, which keeps norms and the weights' gradients in fp32, and DeepSpeed
# keeps bf16 gradients.
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


@dataclass(slots=True)
class Row:
    """One engine on one workload."""

    engine: EngineSpec
    times_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    waiting_s: list[float] = field(default_factory=list)
    rounds: list[list[float]] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)  # after how many steps
    traffic: dict[str, int] | None = None
    memory: Pss | None = None
    problem: str = ""  # "failed", "refused", "not installed", "no time"
    error: str = ""  # one line

    def add_round(self, steps: Steps, num_done: int) -> None:
        """`num_done`: steps since the start, warm-up included; ties the loss to a point."""
        self.times_s += steps.elapsed_s
        self.cpu_s += steps.cpu_s
        self.waiting_s += steps.waiting_s
        self.rounds.append(steps.elapsed_s)
        self.losses.append((num_done, steps.loss))

    @property
    def ran(self) -> bool:
        return not self.problem and bool(self.losses)

    @property
    def median_s(self) -> float:
        return _median(self.times_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """The middle half of all steps."""
        if len(self.times_s) < 2:
            return self.median_s, self.median_s
        low, _, high = statistics.quantiles(self.times_s, n=4, method="inclusive")
        return low, high

    @property
    def loss(self) -> float:
        return self.losses[-1][1] if self.losses else math.nan


@dataclass(slots=True)
class Comparison:
    """All engines on one workload."""

    workload: str
    items: str
    precision: str
    num_ranks: int
    num_micro_batches: int
    rows: list[Row]
    facts: Facts | None = None

    def row(self, kind: str) -> Row | None:
        """The first engine of a kind that ran."""
        return next((r for r in self.rows if r.engine.kind == kind and r.ran), None)

    @property
    def reference(self) -> Row | None:
        """Whose loss the others must have: torch's engines before ours, ours before the rest."""
        kinds = ("fsdp2", "ddp", "fsdp1", "shardwise")
        found = [row for kind in kinds if (row := self.row(kind))]
        return next(iter([*found, *(r for r in self.rows if r.ran and r.engine.trains)]), None)

    def state(self, row: Row) -> str:
        if row.problem:
            return row.problem
        return "ok" if self._trains_the_same(row) else "INVALID"

    def _trains_the_same(self, row: Row) -> bool:
        """After equally many steps, the same loss."""
        reference = self.reference
        if not row.engine.trains:
            return True
        if reference is None or not row.losses:
            return False
        theirs = dict(reference.losses)
        shared = [(theirs[n], loss) for n, loss in row.losses if n in theirs]
        tolerance = LOSS_TOLERANCE[self.precision]
        return bool(shared) and all(abs(a - b) <= tolerance * abs(a) for a, b in shared)

    @property
    def is_sound(self) -> bool:
        """Something ran, and nothing that ran is wrong or broken."""
        states = [self.state(row) for row in self.rows]
        return "ok" in states and not {"INVALID", "failed"} & set(states)

    def ratios(self, row: Row) -> dict[str, float | None]:
        """To the floor and to FSDP2; `excess` is what the step takes beyond the floor."""
        floor, fsdp2 = self.row("floor"), self.row("fsdp2")
        excess = memory = None
        if floor and fsdp2 and fsdp2.median_s > floor.median_s:
            excess = (row.median_s - floor.median_s) / (fsdp2.median_s - floor.median_s)
        if fsdp2 and fsdp2.memory and row.memory:
            memory = row.memory.total / fsdp2.memory.total
        if not row.times_s:
            return {"memory_to_fsdp2": memory}
        return {
            "step_to_floor": row.median_s / floor.median_s if floor else None,
            "step_to_fsdp2": row.median_s / fsdp2.median_s if fsdp2 else None,
            "excess_to_fsdp2": excess,
            "memory_to_fsdp2": memory,
        }

    def exposed_s(self, row: Row) -> float | None:
        """What a step takes beyond the floor: communication that computing did not hide."""
        floor = self.row("floor")
        return row.median_s - floor.median_s if floor else None

    def items_per_s(self, row: Row) -> float:
        items = self.facts.items_per_step if self.facts else 0
        return self.num_ranks * items / row.median_s

    @property
    def title(self) -> str:
        facts = self.facts or Facts(0, 0)
        micro = f", {self.num_micro_batches} micro-batches" if self.num_micro_batches > 1 else ""
        return (
            f"{self.workload} ({facts.num_params / 1e6:.1f}M parameters), {self.precision}, "
            f"{counted(self.num_ranks, 'rank')}, {facts.items_per_step:,} {self.items} per rank "
            f"and step{micro}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "precision": self.precision,
            "num_ranks": self.num_ranks,
            "num_micro_batches": self.num_micro_batches,
            "num_params": self.facts and self.facts.num_params,
            f"{self.items}_per_rank": self.facts and self.facts.items_per_step,
            "engines": {row.engine.name: self._row_json(row) for row in self.rows},
        }

    def _row_json(self, row: Row) -> dict[str, Any]:
        state = self.state(row)
        if row.problem:
            return {"state": state, "valid": False, "error": row.error}
        memory = row.memory
        return {
            "state": state,
            "valid": state == "ok",
            **(self._times_json(row) if row.times_s else {}),
            **{k: v if v is None else round(v, 4) for k, v in self.ratios(row).items()},
            "traffic_per_step_and_rank": row.traffic,
            "peak_memory_bytes": memory and memory.total,
            "peak_memory_parts_bytes": memory
            and {"anonymous": memory.anonymous, "shared": memory.shared, "file": memory.file},
            "loss": row.loss,
            "losses_after_steps": [[n, round(loss, 5)] for n, loss in row.losses],
            "error": row.error or None,
        }

    def _times_json(self, row: Row) -> dict[str, Any]:
        exposed_s = self.exposed_s(row)
        return {
            "step_s": round(row.median_s, 5),
            "step_quartiles_s": [round(t, 5) for t in row.quartiles_s],
            "cpu_s_per_rank": round(_median(row.cpu_s), 5),
            "waiting_s": round(_median(row.waiting_s), 5),
            "exposed_s": exposed_s if exposed_s is None else round(exposed_s, 5),
            "num_timed_steps": len(row.times_s),
            "round_medians_s": [round(statistics.median(r), 5) for r in row.rounds],
            f"{self.items}_per_s": round(self.items_per_s(row), 1),
        }


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan
