"""A comparison as a table for the console."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.bench.rows import Comparison, Row

_COLUMNS = (
    "step ms", "middle half", "per s", "/ floor", "excess", "exposed", "waiting", "moved MiB",
    "gathers", "peak MiB", "/ FSDP2", "loss", "",
)  # fmt: skip
LEGEND = (
    "step: median and middle half. excess: step beyond the floor, where FSDP2's is 1. exposed: "
    "step beyond the floor, ms. waiting: the rank's main thread did not run, ms. moved: what a "
    "rank receives in a step. gathers: of parameters in a step. peak: memory of the job"
)


def table_of(comparison: Comparison) -> Table:
    table = Table(title=comparison.title, title_justify="left", pad_edge=False)
    table.add_column("engine", overflow="fold", max_width=34)
    for name in _COLUMNS:
        name = f"{comparison.items}/s" if name == "per s" else name
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison.rows:
        if not row.problem:
            table.add_row(row.engine.name, *_cells(comparison, row))
        else:
            table.add_row(row.engine.name, *[""] * (len(_COLUMNS) - 1), row.problem)
    return table


def notes_of(comparison: Comparison) -> list[str]:
    """A line for each row that has something to say."""
    return [f"{row.engine.name}: {row.error}" for row in comparison.rows if row.error]


def show(console: Console, comparison: Comparison) -> None:
    console.print(table_of(comparison))
    for note in notes_of(comparison):
        console.print(f"  {note}", markup=False, highlight=False)


def console_of(stream: Any) -> Console:
    """As wide as the terminal, or wide enough for the table in a file."""
    return Console(file=stream, width=None if stream.isatty() else 160)


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
