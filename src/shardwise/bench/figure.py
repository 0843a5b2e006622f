"""A comparison as a picture: step time (with the floor marked), and the job's peak memory where it
was measured. Drawn from what `--json` writes, so that old results can be drawn again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.units import counted

_OURS, _OTHERS, _FLOOR = "#1f6f8b", "#b0b7bd", "#dfe3e6"
Rows = dict[str, Mapping[str, Any]]  # engine -> its part of the result


def draw(comparisons: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A line of panels for each comparison; PNG, or what the suffix says."""
    drawn = [(c, rows) for c in comparisons if (rows := _rows(c))]
    if not drawn:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    heights = [1.2 + 0.34 * len(rows) for _, rows in drawn]
    num_panels = 1 + any(_memory(rows) for _, rows in drawn)
    figure, axes = plt.subplots(
        len(drawn),
        num_panels,
        figsize=(1.5 + 4.75 * num_panels, sum(heights)),
        height_ratios=heights,
        squeeze=False,
    )
    for (comparison, rows), panels in zip(drawn, axes, strict=True):
        _draw_times(panels[0], rows)
        panels[0].set_title(_title(comparison), loc="left", fontsize=9)
        if memory := _memory(rows):
            _panel(panels[1], list(rows), memory, memory, "peak memory of the job, MiB")
            panels[1].set_yticklabels([])
        elif num_panels > 1:
            panels[1].set_axis_off()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _rows(comparison: Mapping[str, Any]) -> Rows:
    """The engines that were timed, the last at the bottom."""
    timed = [(name, row) for name, row in comparison["engines"].items() if "step_s" in row]
    return dict(reversed(timed))


def _draw_times(axis: Any, rows: Rows) -> None:
    times = {name: row["step_s"] * 1e3 for name, row in rows.items()}
    middle = {name: [t * 1e3 for t in row["step_quartiles_s"]] for name, row in rows.items()}
    ends = {name: max(times[name], high) for name, (_, high) in middle.items()}
    _panel(axis, list(rows), times, ends, "step, ms (middle half)")
    low = [times[name] - middle[name][0] for name in rows]
    high = [middle[name][1] - times[name] for name in rows]
    axis.errorbar(
        list(times.values()), range(len(rows)), xerr=[low, high],
        fmt="none", ecolor="#333333", elinewidth=1, capsize=2,
    )  # fmt: skip
    if floor := next((times[name] for name in times if _kind(name) == "floor"), None):
        axis.axvline(floor, color="#333333", linewidth=0.8, linestyle=":")


def _memory(rows: Rows) -> dict[str, float]:
    """MiB of the engines of which it was measured."""
    measured = {name: row.get("peak_memory_bytes") for name, row in rows.items()}
    return {name: size / 2**20 for name, size in measured.items() if size}


def _panel(
    axis: Any, names: list[str], values: dict[str, float], ends: dict[str, float], label: str
) -> None:
    """Bars with their numbers behind `ends`; no bar where there is no number."""
    colors = {"shardwise": _OURS, "floor": _FLOOR}
    for position, name in enumerate(names):
        if name in values:
            axis.barh(position, values[name], color=colors.get(_kind(name), _OTHERS))
            text = f" {values[name]:,.0f}"
            axis.annotate(
                text, (ends[name], position), (3, 0), textcoords="offset points", va="center",
                fontsize=7,
            )  # fmt: skip
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.set_xlabel(label, fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.margins(x=0.15)
    axis.set_xlim(left=0)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _kind(name: str) -> str:
    return name.partition(":")[0].partition("@")[0]


def _title(comparison: Mapping[str, Any]) -> str:
    items = next(key.removesuffix("_per_rank") for key in comparison if key.endswith("_per_rank"))
    micro = comparison["num_micro_batches"]
    return (
        f"{comparison['workload']} ({(comparison['num_params'] or 0) / 1e6:.1f}M parameters), "
        f"{comparison['precision']}, {counted(comparison['num_ranks'], 'rank')}, "
        f"{comparison[f'{items}_per_rank'] or 0:,} {items} per rank and step"
        + (f", {micro} micro-batches" if micro > 1 else "")
    )
