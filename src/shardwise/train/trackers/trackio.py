"""trackio: a dashboard on this machine, or in a space of Hugging Face (TRACKIO_SPACE_ID)."""

from __future__ import annotations

import os
from importlib import import_module

from shardwise.train.trackers import Run


class Place:
    """A `Tracker`."""

    def __init__(self, run: Run) -> None:
        self._trackio = import_module("trackio")
        self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "shardwise"),
            name=run.name,
            config=run.config,
            resume="allow",
        )

    def numbers(self, step: int, row: dict[str, float]) -> None:
        self._trackio.log(row, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._trackio.log({name: text}, step=step)

    def close(self) -> None:
        self._trackio.finish()
