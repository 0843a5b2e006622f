"""Where a job starts: at the newest whole checkpoint of its run directory, at a named one, or at
zero.

Everything is checked before anything is written: another model, other data or another optimizer is
refused with one error that lists what differs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shardwise.checkpoint.loading import differences
from shardwise.checkpoint.manager import CheckpointManager, read_extra
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.source import CheckpointSource
from shardwise.checkpoint.store import Checkpoint
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train import numerics
from shardwise.train.config import Config
from shardwise.train.data import Data


def find_start(
    config: Config,
    manager: CheckpointManager,
    ranks: Ranks,
    data: Data,
    model: nn.Module,
    device: torch.device,
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to start from, and what the user should know about the choice."""
    newest, skipped = manager.latest()
    notes = [f"skipped {text}" for text in skipped]
    resume = config.checkpoint.resume
    if resume == "off" and (newest is not None or skipped):
        raise ConfigError(
            f"checkpoint.resume: is off, but {manager.directory} holds checkpoints; "
            "use another run.dir, or resume = 'auto'"
        )
    if newest is None and resume not in ("auto", "off"):
        newest = _open_named(manager, Path(resume).expanduser())
    if newest is None:
        if skipped:
            notes.append("no complete checkpoint is left; starting from the beginning")
        return None, notes
    found = newest
    ranks.on_each(lambda: _check(found, config, data, model))
    ranks.on_each(lambda: _check_numerics(found, config, device, ranks))
    return found, notes


def _open_named(manager: CheckpointManager, path: Path) -> Checkpoint:
    try:
        return manager.open(path)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.resume: {error}") from None


def _check(checkpoint: Checkpoint, config: Config, data: Data, model: nn.Module) -> None:
    source = CheckpointSource(checkpoint)
    source.close()
    if found := differences(source, model, cast=False):
        raise ConfigError(
            f"{checkpoint.path}: is of another model: {found}. "
            "Use another run.dir, or the [model] that it was made with"
        )
    facts = read_extra(checkpoint)
    if (facts["data"], facts["seed"]) != (data.fingerprint, config.run.seed):
        was, now = (
            f"[{f} seed={s}]"
            for f, s in ((facts["data"], facts["seed"]), (data.fingerprint, config.run.seed))
        )
        raise ConfigError(
            f"{checkpoint.path}: was trained on other data or in another order: {was}, now {now}. "
            "Use another run.dir, or the [data] and run.seed that it was made with"
        )


def _check_numerics(
    checkpoint: Checkpoint, config: Config, device: torch.device, ranks: Ranks
) -> None:
    saved = read_extra(checkpoint).get("numerics")
    if found := numerics.changes(config, saved, device, ranks):
        raise ConfigError(
            f"{checkpoint.path}: run.reproducible = {config.run.reproducible} cannot give the "
            f"numbers of an uninterrupted run: {'; '.join(found)}. Continue where it was written, "
            "or with run.reproducible = 'off'"
        )
