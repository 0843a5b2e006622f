"""Weights & Biases; its own variables choose account, project and mode (WANDB_PROJECT,
WANDB_MODE). A run that is started again goes on under its id, which is kept in RUN/wandb_id."""

from __future__ import annotations

import os
from importlib import import_module

from shardwise.checkpoint.files import replace_file, text_of
from shardwise.train.trackers import Run


class Place:
    """A `Tracker`."""

    def __init__(self, run: Run) -> None:
        wandb = import_module("wandb")
        file = run.directory / "wandb_id"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shardwise"),
            name=run.name,
            id=text_of(file).strip() or None,
            resume="allow",
            dir=str(run.directory),
            config=run.config,
        )
        replace_file(file, str(self._run.id).encode())

    def numbers(self, step: int, row: dict[str, float]) -> None:
        self._run.log(row, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: text}, step=step)

    def close(self) -> None:
        self._run.finish()
