"""A comparison as a picture: step time (with the floor marked) beside the job's peak memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.bench.rows import Comparison, Row

_OURS, _OTHERS, _FLOOR = "#1f6f8b", "#b0b7bd", "#dfe3e6"


def draw(comparisons: list[Comparison], path: Path) -> None:
    """One line of two panels for each comparison; PNG, or what the suffix says."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawn = [c for c in comparisons if any(row.ran for row in c.rows)]
    if not drawn:
        return
    heights = [1.2 + 0.34 * sum(row.ran for row in c.rows) for c in drawn]
    figure, axes = plt.subplots(
        len(drawn), 2, figsize=(11, sum(heights)), height_ratios=heights, squeeze=False
    )
    for comparison, (left, right) in zip(drawn, axes, strict=True):
        rows = [row for row in comparison.rows if row.ran][::-1]
        _panel(left, rows, [row.median_s * 1e3 for row in rows], "step, ms (middle half)")
        low = [(row.median_s - row.quartiles_s[0]) * 1e3 for row in rows]
        high = [(row.quartiles_s[1] - row.median_s) * 1e3 for row in rows]
        left.errorbar(
            [row.median_s * 1e3 for row in rows], range(len(rows)), xerr=[low, high],
            fmt="none", ecolor="#333333", elinewidth=1, capsize=2,
        )  # fmt: skip
        floor = comparison.row("floor")
        if floor:
            left.axvline(floor.median_s * 1e3, color="#333333", linewidth=0.8, linestyle=":")
        sizes = [row.memory.total / 2**20 if row.memory else 0.0 for row in rows]
        _panel(right, rows, sizes, "peak memory of the job, MiB")
        right.set_yticklabels([])
        left.set_title(comparison.title, loc="left", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(axis: Any, rows: list[Row], values: list[float], label: str) -> None:
    colours = {"shardwise": _OURS, "floor": _FLOOR}
    colors = [colours.get(row.engine.kind, _OTHERS) for row in rows]
    axis.barh(range(len(rows)), values, color=colors)
    for position, value in enumerate(values):
        axis.text(value, position, f" {value:,.0f}", va="center", fontsize=7)
    axis.set_yticks(range(len(rows)), [row.engine.name for row in rows], fontsize=8)
    axis.set_xlabel(label, fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.margins(x=0.15)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
