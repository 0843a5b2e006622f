"""Rows of the engine benchmark: medians, spread, ratios, validity; as a table and as JSON."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from memory import Pss
from rank_group import Steps
from trainers import EngineSpec

# How far losses may lie apart, relative: fp32 engines differ in the order of sums only; under bf16
# DDP computes by autocast, which keeps norms and the weights' gradients in fp32.
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


@dataclass(slots=True)
class Row:
    """One engine on one workload."""

    engine: EngineSpec
    times_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    rounds: list[list[float]] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)  # after how many steps
    memory: Pss | None = None
    error: str | None = None

    def add_round(self, steps: Steps, num_done: int) -> None:
        """`num_done`: steps since the start, warm-up included; ties the loss to a point."""
        self.times_s += steps.elapsed_s
        self.cpu_s += steps.cpu_s
        self.rounds.append(steps.elapsed_s)
        self.losses.append((num_done, steps.loss))

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s) if self.times_s else math.nan

    @property
    def median_cpu_s(self) -> float:
        """Processor time of a rank per step: what load from other programs changes least."""
        return statistics.median(self.cpu_s) if self.cpu_s else math.nan

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
    precision: str
    num_ranks: int
    num_tokens: int
    num_params: int
    rows: list[Row]

    def row(self, kind: str) -> Row | None:
        """The first engine of a kind that ran."""
        return next((r for r in self.rows if r.engine.kind == kind and r.times_s), None)

    @property
    def reference(self) -> Row | None:
        """Whose loss the others must have: torch's engines before ours."""
        return self.row("fsdp2") or self.row("ddp") or self.row("shardwise")

    def is_valid(self, row: Row) -> bool:
        """The engine trains the same model: after equally many steps, the same loss."""
        reference = self.reference
        if row.error is not None or reference is None or not row.losses:
            return False
        if not row.engine.trains:
            return True
        theirs = dict(reference.losses)
        shared = [(theirs[n], loss) for n, loss in row.losses if n in theirs]
        tolerance = LOSS_TOLERANCE[self.precision]
        return bool(shared) and all(abs(a - b) <= tolerance * abs(a) for a, b in shared)

    def ratios(self, row: Row) -> dict[str, float | None]:
        """To the floor and to FSDP2; `excess` is what the step takes beyond the floor."""
        floor, fsdp2 = self.row("floor"), self.row("fsdp2")
        to_floor = row.median_s / floor.median_s if floor else None
        to_fsdp2 = row.median_s / fsdp2.median_s if fsdp2 else None
        excess = None
        if floor and fsdp2 and fsdp2.median_s > floor.median_s:
            excess = (row.median_s - floor.median_s) / (fsdp2.median_s - floor.median_s)
        memory = None
        if fsdp2 and fsdp2.memory and row.memory:
            memory = row.memory.total / fsdp2.memory.total
        return {
            "step_to_floor": to_floor,
            "step_to_fsdp2": to_fsdp2,
            "excess_to_fsdp2": excess,
            "memory_to_fsdp2": memory,
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "precision": self.precision,
            "num_ranks": self.num_ranks,
            "num_params": self.num_params,
            "tokens_per_rank": self.num_tokens,
            "engines": {row.engine.name: self._row_json(row) for row in self.rows},
        }

    def _row_json(self, row: Row) -> dict[str, Any]:
        if row.error is not None:
            return {"error": row.error.strip().splitlines()[-1]}
        memory = row.memory
        return {
            "valid": self.is_valid(row),
            "step_s": round(row.median_s, 5),
            "step_quartiles_s": [round(t, 5) for t in row.quartiles_s],
            "cpu_s_per_rank": round(row.median_cpu_s, 5),
            "num_timed_steps": len(row.times_s),
            "round_medians_s": [round(statistics.median(r), 5) for r in row.rounds],
            "tokens_per_s": round(self.num_ranks * self.num_tokens / row.median_s, 1),
            **{k: v if v is None else round(v, 4) for k, v in self.ratios(row).items()},
            "peak_memory_bytes": memory and memory.total,
            "peak_memory_parts_bytes": memory
            and {"anonymous": memory.anonymous, "shared": memory.shared, "file": memory.file},
            "loss": row.loss,
            "losses_after_steps": [[n, round(loss, 5)] for n, loss in row.losses],
        }

    def table(self) -> Table:
        title = (
            f"{self.workload} decoder ({self.num_params / 1e6:.1f}M parameters), {self.precision}, "
            f"{self.num_ranks} ranks, {self.num_tokens} tokens per rank"
        )
        table = Table(title=title, title_justify="left")
        table.add_column("engine", overflow="fold", max_width=30)
        for name in (
            "step ms", "middle half", "cpu ms", "tokens/s", "/ floor", "/ FSDP2", "excess",
            "MiB", "/ FSDP2", "loss", "",
        ):  # fmt: skip
            table.add_column(name, justify="right")
        for row in self.rows:
            if row.error is not None:
                table.add_row(row.engine.name, row.error.strip().splitlines()[-1][:60])
                continue
            ratios = self.ratios(row)
            low, high = row.quartiles_s
            verdict = "valid" if self.is_valid(row) else "INVALID"
            table.add_row(
                row.engine.name,
                f"{row.median_s * 1e3:.1f}",
                f"{low * 1e3:.0f}-{high * 1e3:.0f}",
                f"{row.median_cpu_s * 1e3:.0f}",
                f"{self.num_ranks * self.num_tokens / row.median_s:,.0f}",
                _ratio(ratios["step_to_floor"]),
                _ratio(ratios["step_to_fsdp2"]),
                _ratio(ratios["excess_to_fsdp2"]),
                f"{row.memory.total / 2**20:,.0f}" if row.memory else "-",
                _ratio(ratios["memory_to_fsdp2"]),
                f"{row.loss:.4f}",
                verdict if row.engine.trains else "-",
            )
        return table


def show(console: Console, comparisons: list[Comparison], facts: dict[str, Any]) -> None:
    for comparison in comparisons:
        console.print(comparison.table())
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
