"""The pictures of a report, as SVG that stands inside the page: nothing is loaded from elsewhere.

loss        of every step, with evaluations and the starts of the run
speed       tokens per second of every step
memory      what the plan said of a rank, by kind, over what the run took at most, and that by step
time        what a step consisted of, mean over ranks: computing, waiting for peers, samples, a core
            that another process had, the rest
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from shardwise.units import text_of_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.doctor.run.case import Case

MIB = 2**20
_COLORS = ("#1f6f8b", "#e07a5f", "#81b29a", "#f2cc8f", "#6d597a", "#b0b7bd", "#3d405b")
_PARTS = {  # of a step, by their names in ranks.jsonl
    "busy_s": "computing",
    "waiting_s": "waiting for peers",
    "data_s": "samples",
    "queue_s": "another process had the core",
}
_MOST_POINTS = 2000


def loss(case: Case) -> str:
    rows = thinned([row for row in case.rows if "loss" in row])
    if not rows:
        return ""
    held = [row for row in case.all_rows if "val_loss" in row]
    starts = [row["step"] for row in case.log if row.get("event") == "start" and row["step"] > 0]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(*_steps(rows, "loss"), lw=0.9, color=_COLORS[0], label="loss")
        if held:
            axes.plot(*_steps(held, "val_loss"), "o-", ms=4, color=_COLORS[1], label="val_loss")
        for at in starts:
            axes.axvline(at, color=_COLORS[5], lw=0.8, ls=":")
        axes.set(xlabel="step", ylabel="loss")
        axes.legend(frameon=False)

    return svg(draw, "loss")


def speed(case: Case) -> str:
    rows = thinned([row for row in case.rows if row.get("tokens_per_s")])
    if not rows:
        return ""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(*_steps(rows, "tokens_per_s"), lw=0.9, color=_COLORS[0])
        axes.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))

    return svg(draw, "speed")


def memory(case: Case, predicted: dict[str, int]) -> str:
    """`predicted`: bytes by kind; empty where they are not known."""
    sums = ("predicted", "measured")
    kinds = {name: size for name, size in predicted.items() if name not in sums and size}
    base = case.start.get("base_bytes", 0)
    rows = thinned([row for row in case.rows if "peak_memory_bytes" in row])
    if not rows or not base:
        return ""

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2, width_ratios=(3, 2))
        left = 0.0
        for (name, size), color in zip(kinds.items(), _COLORS, strict=False):
            label = f"{name}, {text_of_bytes(size)}"
            panels[0].barh(1, size / MIB, left=left, color=color, label=label)
            left += size / MIB
        panels[0].barh(0, case.growth_bytes / MIB, color="#444444")
        panels[0].set_yticks([0, 1], ["measured,\nat most", "by the plan"])
        panels[0].set(xlabel="MiB of a rank, its process before left out", ylim=(-0.6, 1.6))
        if kinds:
            panels[0].legend(frameon=False, fontsize=7, loc="upper center", ncols=2,
                             bbox_to_anchor=(0.5, -0.28))  # fmt: skip
        steps, peaks = _steps(rows, "peak_memory_bytes")
        panels[1].plot(steps, [(p - base) / MIB for p in peaks], color="#444444", lw=0.9)
        panels[1].set(xlabel="step", ylabel="MiB so far, at most", ylim=(0, None))

    return svg(draw, "memory", height=3.6)


def time(case: Case) -> str:
    rows = thinned(case.by_rank)
    if len(rows) < 2:
        return ""
    parts = {label: [fmean(row[name]) for row in rows] for name, label in _PARTS.items()}
    whole = [row["step_time_s"] for row in rows]
    sums = [sum(each) for each in zip(*parts.values(), strict=True)]
    parts["the rest"] = [max(0.0, all_ - known) for all_, known in zip(whole, sums, strict=True)]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        steps = [row["step"] for row in rows]
        axes.stackplot(steps, *parts.values(), labels=list(parts), colors=_COLORS)
        axes.set(xlabel="step", ylabel="seconds of a step, mean of ranks")
        axes.legend(frameon=False, fontsize=8, loc="upper right", reverse=True)

    return svg(draw, "time")


def thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most some thousand of them, evenly spread, the last one included."""
    every = -(-len(rows) // _MOST_POINTS)
    return list(rows[::-1][:: max(1, every)][::-1])


def _steps(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [row["step"] for row in rows], [row[name] for row in rows]


def svg(draw: Callable[[Figure], None], name: str, *, height: float = 3.0) -> str:
    """What `draw` draws, without a header, dates or addresses; ids begin with `name`, since all
    pictures of a page share them.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "svg.id": name}):
        figure = Figure(figsize=(7.5, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        for axes in figure.axes:
            axes.grid(alpha=0.25)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(rf'(\bid="|url\(#|href="#)(?!{name}-)', rf"\g<1>{name}-", text)
