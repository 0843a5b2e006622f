"""The tables at the end: one for each stage, and one of the stages."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from gpu_hour_parts.launch import Result
from gpu_hour_parts.settings import Row
from shardwise.train.columns import Column, print_columns


def show_stage(console: Console, result: Result) -> None:
    title = f"{result.stage.name}: {result.stage.about}"
    if result.why:
        console.print(f"{title}: skipped, {result.why}", markup=False)
        return
    names = result.stage.columns
    columns = [Column("item", [row["item"] for row in result.rows], is_number=False)]
    columns += [
        Column(_heading(name), [_cell(name, row.get(name)) for row in result.rows],
               name not in ("found", "said"))
        for name in names
    ]  # fmt: skip
    columns.append(Column("", [row["state"] for row in result.rows], is_number=False))
    print_columns(console, title, columns)
    for row in result.rows:
        if said := row.get("error") or row.get("why"):
            where = f" on rank {row['rank']}" if "rank" in row else ""
            console.print(f"  {row['item']}: {row['state']}{where}: {said}", markup=False)


def show_all(console: Console, results: list[Result]) -> None:
    def number(state: str) -> list[str]:
        return [str(sum(row["state"] == state for row in r.rows) or "") for r in results]

    print_columns(
        console,
        "all stages",
        [
            Column("stage", [r.stage.name for r in results], is_number=False),
            Column("", [r.state for r in results], is_number=False),
            *(Column(state, number(state)) for state in _STATES),
            Column("seconds", [f"{r.seconds:.0f}" for r in results]),
            Column("why", [r.why for r in results], is_number=False),
        ],
    )


_STATES = ("ok", "wrong", "failed", "skipped", "not run")
_UNITS = {"_bytes": ("MiB", 2**20, "{:,.0f}"), "_s": ("ms", 1e-3, "{:,.2f}")}


def _unit(name: str) -> tuple[str, str, float, str] | None:
    if name.endswith("per_s"):
        return None
    for ending, (unit, size, form) in _UNITS.items():
        if name.endswith(ending):
            return f"{name.removesuffix(ending)} {unit}".replace("_", " "), unit, size, form
    return None


def _heading(name: str) -> str:
    unit = _unit(name)
    return unit[0] if unit else name.replace("_", " ")


def _cell(name: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if unit := _unit(name):
        return unit[3].format(value / unit[2])
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1 else f"{value:.2g}"
    return f"{value:,}" if isinstance(value, int) else str(value).splitlines()[0][:60]


def summary(rows: list[Row]) -> str:
    """For one line while it runs."""
    counts = {state: sum(row["state"] == state for row in rows) for state in _STATES}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)
