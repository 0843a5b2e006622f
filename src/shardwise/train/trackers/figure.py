"""RUN/loss.png: the losses of all steps so far, the evaluations' on top. Drawn at the end and,
while the run goes on, at an evaluation, once a minute at most."""

from __future__ import annotations

import math
import time

from shardwise.train.metrics import read_metrics
from shardwise.train.trackers import Run

_EVERY_S = 60.0


class Place:
    """A `Tracker`, whose numbers are those of metrics.jsonl."""

    def __init__(self, run: Run) -> None:
        self._run, self._drawn = run, time.monotonic()

    def numbers(self, step: int, row: dict[str, float]) -> None:
        if "val_loss" in row and time.monotonic() - self._drawn > _EVERY_S:
            self._draw()

    def text(self, step: int, name: str, text: str) -> None:
        """Not drawn."""

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._drawn = time.monotonic()
        every = read_metrics(self._run.directory / "metrics.jsonl")
        rows = [r for r in every if "loss" in r]
        if not rows:
            return
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], lw=0.8, label="loss")
        held = [r for r in every if "val_loss" in r]
        if held:
            axes.plot(
                [r["step"] for r in held], [r["val_loss"] for r in held], "o-", label="val_loss"
            )
        losses = [r["loss"] for r in rows]
        if min(losses) > 0 and max(losses) / min(losses) > 10**math.pi:
            axes.set_yscale("log")
        axes.set(xlabel="step", ylabel="loss", title=self._run.name)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self._run.directory / "loss.png", dpi=120)
