"""Rows as a table for the console, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.doctor.plan import Row
from shardwise.train.columns import Column, print_columns

_NUMBERS = ("step ms", "waiting", "moved KiB", "peak MiB")
_STYLES = {"PASS": "green", "FAIL": "bold red", "SKIP": "yellow"}
LEGEND = (
    "step: median after the compared steps (the warm-up). waiting: share of it in which a rank's "
    "main thread did not run: communication, and whatever else keeps the processor. moved: what a "
    "rank receives in a step. peak: memory of all ranks (PSS) in one step"
)


_WIDE = 120


def show(console: Console, rows: Sequence[Row], title: str) -> None:
    """A table; on a narrow console its texts stand below its numbers."""
    if console.width >= _WIDE:
        console.print(table_of(rows, title))
        return
    columns = [
        Column("rung", [f"{row.rung}: {row.what}" for row in rows], is_number=False),
        Column("", [row.result for row in rows]),
    ]
    numbers = zip(*(_numbers(row) for row in rows), strict=True)
    columns += [Column(name, list(cells)) for name, cells in zip(_NUMBERS, numbers, strict=True)]
    print_columns(console, title, columns)
    for row in rows:
        if row.detail:
            console.print(f"{row.rung}: {row.what}: {row.detail}", markup=False)


def table_of(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("rung", no_wrap=True)
    table.add_column("what")
    table.add_column("", no_wrap=True)
    for name in _NUMBERS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("compared, or what differs first", overflow="fold")
    for row in rows:
        result = Text(row.result, style=_STYLES[row.result])
        table.add_row(row.rung, Text(row.what), result, *_numbers(row), Text(row.detail))
    return table


def _numbers(row: Row) -> list[str]:
    return [
        _number(row.step_s, 1e3, ".1f"),
        _number(row.waiting, 100, ".0f", "%"),
        _number(row.moved_bytes, 1 / 1024, ",.1f"),
        _number(row.peak_bytes, 1 / 2**20, ",.0f"),
    ]


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    keys = ("rung", "what", "result", "detail", "step_s", "waiting", "moved_bytes", "peak_bytes")
    passed = all(row.result != "FAIL" for row in rows)
    return {"passed": passed, "rows": [{k: getattr(row, k) for k in keys} for row in rows]}


def _number(value: float | None, factor: float, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value * factor:{form}}{unit}"
