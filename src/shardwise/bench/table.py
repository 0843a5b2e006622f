"""A comparison as a table for the console."""

from __future__ import annotations

import statistics

from rich.console import Console

from shardwise.bench.rows import Comparison, Row
from shardwise.train.columns import Column, print_columns

_COLUMNS = (
    "step ms", "middle half", "per s", "/ floor", "excess", "exposed", "waiting", "moved MiB",
    "gathers", "peak MiB", "/ FSDP2", "loss", "",
)  # fmt: skip
LEGEND = (
    "step: median and middle half. excess: step beyond the floor, where FSDP2's is 1. exposed: "
    "step beyond the floor, ms. waiting: the rank's main thread did not run, ms. moved: what a "
    "rank receives in a step. gathers: of parameters in a step. peak: memory of the job"
)


def columns_of(comparison: Comparison) -> list[Column]:
    names = [f"{comparison.items}/s" if name == "per s" else name for name in _COLUMNS]
    empty = [""] * (len(names) - 1)
    rows = [
        [*empty, row.problem] if row.problem else _cells(comparison, row) for row in comparison.rows
    ]
    engines = Column("engine", [row.engine.name for row in comparison.rows], is_number=False)
    columns = zip(names, zip(*rows, strict=True), strict=True)
    return [engines, *(Column(name, list(cells)) for name, cells in columns)]


def notes_of(comparison: Comparison) -> list[str]:
    """A line for each row that has something to say."""
    return [f"{row.engine.name}: {row.error}" for row in comparison.rows if row.error]


def show(console: Console, comparison: Comparison) -> None:
    print_columns(console, comparison.title, columns_of(comparison))
    for note in notes_of(comparison):
        console.print(f"  {note}", markup=False, highlight=False)


def _cells(comparison: Comparison, row: Row) -> list[str]:
    ratios, state = comparison.ratios(row), comparison.state(row)
    return [
        *(_times(comparison, row) if row.times_s else ["-"] * 7),
        f"{row.traffic['total_bytes'] / 2**20:,.1f}" if row.traffic else "-",
        f"{row.traffic['num_gathers']}" if row.traffic else "-",
        f"{row.memory.total / 2**20:,.0f}" if row.memory else "-",
        _ratio(ratios["memory_to_fsdp2"]),
        f"{row.loss:.4f}",
        state if row.engine.trains else "-",
    ]


def _times(comparison: Comparison, row: Row) -> list[str]:
    ratios = comparison.ratios(row)
    low, high = row.quartiles_s
    exposed_s = comparison.exposed_s(row)
    return [
        f"{row.median_s * 1e3:.1f}",
        f"{low * 1e3:.0f}-{high * 1e3:.0f}",
        f"{comparison.items_per_s(row):,.0f}",
        _ratio(ratios["step_to_floor"]),
        _ratio(ratios["excess_to_fsdp2"]),
        "-" if exposed_s is None else f"{exposed_s * 1e3:.0f}",
        f"{statistics.median(row.waiting_s) * 1e3:.0f}",
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
