"""A step as a picture: which unit is gathered, computed and reduced when, and what a rank holds.

Time runs from left to right in events, all of one width: a plan without a device knows their order,
not their length.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.events import Event
from shardwise.plan.walk import KINDS, Walk

_GATHERED, _REDUCED, _FORWARD, _BACKWARD = "#cfe3ea", "#e8c39e", "#1f6f8b", "#8b3a1f"
_OF_MEMORY = {
    "parameters": "#1f6f8b", "optimizer": "#5a9bb0", "gradients": "#c98f5a", "gathered": "#cfe3ea",
    "buffers": "#b0b7bd", "activations": "#e5d8c8", "logits": "#d9b6c4",
}  # fmt: skip
Span = tuple[str, int, int]  # of a unit, from one event to another


def check(path: Path) -> None:
    """ConfigError where no picture can be drawn."""
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"--picture: {path} is no .svg, .png or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError('--picture: needs matplotlib (pip install "shardwise[figures]")')


def spans(events: Sequence[Event], begins: str, ends: str) -> list[Span]:
    """From an event of one code to the next of the other of the same unit, or to the end."""
    found: list[Span] = []
    open_: dict[str, int] = {}
    for number, event in enumerate(events):
        if event.code == begins:
            open_.setdefault(event.unit, number)
        elif event.code == ends and event.unit in open_:
            found.append((event.unit, open_.pop(event.unit), number))
    return found + [(unit, begin, len(events)) for unit, begin in open_.items()]


def draw(walk: Walk, path: Path) -> None:
    """Writes the picture of a step."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    units = list(dict.fromkeys(event.unit for event in walk.events))
    height = 1.0 + 0.28 * len(units)
    figure, (lanes, memory) = plt.subplots(
        2, 1, sharex=True, figsize=(9.0, height + 2.4), height_ratios=[height, 2.2]
    )
    _draw_lanes(lanes, walk, units)
    _draw_memory(memory, walk)
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--picture: {path} cannot be written: {reason}") from None
    finally:
        plt.close(figure)


def _draw_lanes(axis: Any, walk: Walk, units: Sequence[str]) -> None:
    rows = {unit: row for row, unit in enumerate(reversed(units))}
    shown = (("AG", "FR", _GATHERED, "gathered"), ("RS", "G", _REDUCED, "reduced"))
    for begins, ends, color, label in shown:
        found = spans(walk.events, begins, ends)
        axis.barh(
            [rows[unit] for unit, _, _ in found], [end - begin for _, begin, end in found],
            left=[begin for _, begin, _ in found], height=0.8, color=color, label=label,
        )  # fmt: skip
    for code, color, label in (("F", _FORWARD, "forward"), ("B", _BACKWARD, "backward begins")):
        at = [(i, rows[e.unit]) for i, e in enumerate(walk.events) if e.code == code]
        axis.scatter(
            [x for x, _ in at], [y for _, y in at], s=26, color=color, label=label, zorder=3
        )
    axis.set_yticks(list(rows.values()), list(rows), fontsize=8)
    axis.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_memory(axis: Any, walk: Walk) -> None:
    at = [number for number, _ in walk.points]
    held = {kind: [point.parts[kind] / 2**20 for _, point in walk.points] for kind in KINDS}
    held = {kind: sizes for kind, sizes in held.items() if any(sizes)}
    colors = [_OF_MEMORY[kind] for kind in held]
    axis.stackplot(at, list(held.values()), labels=list(held), colors=colors, step="post")
    axis.set_ylabel("MiB of a rank", fontsize=8)
    axis.set_xlabel("events of one step", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7, ncols=2, loc="upper right", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
