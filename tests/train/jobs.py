"""Runs whole training jobs inside the rank pool: seconds less than a process per job."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint.ranks import Ranks
from shardwise.train.config_file import load_config
from shardwise.train.job import train

TINY = {
    "model.dim": 32,
    "model.layers": 2,
    "model.heads": 2,
    "data.seq_len": 32,
    "train.global_batch": 12,
    "train.micro_batch": 2,
    "train.steps": 8,
    "train.eval_every": 4,
    "train.eval_samples": 10,
    "optim.warmup_steps": 2,
    "checkpoint.every": 0,
    "log.every": 1000,
}


class StopAfter:
    """A stop request that comes from this rank in its n-th step."""

    def __init__(self, step: int | None) -> None:
        self._left = step

    @property
    def by(self) -> str:
        if self._left is None:
            return ""
        self._left -= 1
        return "SIGTERM" if self._left == 0 else ""


class Killed(BaseException):
    """What `DieIn` raises: nothing in a job expects it."""


class DieIn:
    """An end without a word in this rank's n-th step, before the optimizer's."""

    def __init__(self, step: int) -> None:
        self._left = step

    @property
    def by(self) -> str:
        self._left -= 1
        if self._left == 0:
            raise Killed
        return ""


def run_job(
    directory: Path,
    *,
    config_file: Path | None = None,
    stop_after: int | None = None,
    die_in: int = 0,
    bare: bool = False,
    **overrides: Any,
) -> None:
    """One rank of the tiny job; every rank of the pool calls it. Keys: `train__steps=3`; `bare`:
    these alone."""
    values = (
        {} if config_file or bare else {"data.source": str(text_file(directory.parent)), **TINY}
    )
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    values |= {"run.dir": str(directory), "run.device": "cpu"}
    values.setdefault("log.trackers", "none")
    loaded = load_config(config_file, [(key, _text(value)) for key, value in values.items()])
    stop: Any = DieIn(die_in) if die_in else StopAfter(stop_after)
    with contextlib.suppress(Killed):
        train(loaded, Ranks(), torch.device("cpu"), stop)
    dist.barrier()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def text_file(folder: Path) -> Path:
    """Some text to train on, the same in every test; ranks of one test share it."""
    path = folder / "text.txt"
    if not dist.is_initialized() or dist.get_rank() == 0:
        words = ["shard", "gather", "reduce", "rank", "unit", "step"]
        text = " ".join(words[(i * i + i // 7) % len(words)] for i in range(4000))
        path.write_text(text)
    if dist.is_initialized():
        dist.barrier()
    return path


def read_rows(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def results(directory: Path) -> list[tuple[Any, ...]]:
    """What must not depend on interruptions: the numbers of each step, not its speed."""
    keys = ("step", "loss", "grad_norm", "lr", "epoch", "val_loss")
    return [tuple(row.get(key) for key in keys) for row in read_rows(directory)]


def checkpoint_names(directory: Path) -> list[str]:
    return sorted(p.name for p in (directory / "checkpoints").iterdir())
