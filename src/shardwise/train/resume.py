"""Where a job starts: at the newest whole state of its run, a copy in memory or a checkpoint on
disk, at a named checkpoint, or at zero.

A copy is looked at first. Where it is newer than all on disk, these are not read.

Everything is checked before anything is written: another model, other data or another optimizer is
refused with one error that lists what differs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shardwise.checkpoint.loading import differences
from shardwise.checkpoint.manager import CheckpointManager, read_extra
from shardwise.checkpoint.memory import MemoryCopies
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.source import CheckpointSource
from shardwise.checkpoint.store import Checkpoint
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train import numerics
from shardwise.train.config import Config
from shardwise.train.config_file import config_as_dict
from shardwise.train.data import Data


def find_start(
    config: Config,
    manager: CheckpointManager,
    copies: MemoryCopies | None,
    ranks: Ranks,
    data: Data,
    model: nn.Module,
    device: torch.device,
) -> tuple[Checkpoint | None, MemoryCopies | None, list[str]]:
    """The checkpoint to start from, the copies in memory if it is one of these, and what the user
    should know about the choice."""
    in_memory, damaged = copies.latest() if copies is not None else (None, [])
    newest, skipped = manager.latest(at_least=in_memory.step if in_memory is not None else 0)
    skipped = damaged + skipped
    notes = [f"skipped {text}" for text in skipped]
    if newest is None:
        newest = in_memory
    resume = config.checkpoint.resume
    if resume == "off" and (newest is not None or skipped):
        where = newest.path.parent if newest is not None else manager.directory
        text = f"checkpoint.resume: is off, but {where} holds checkpoints; "
        raise ranks.agreed(ConfigError(f"{text}use another run.dir, or resume = 'auto'"))
    if newest is None and resume not in ("auto", "off"):
        newest = _open_named(manager, Path(resume).expanduser(), ranks)
    if newest is None:
        if skipped:
            notes.append("no complete checkpoint is left; starting from the beginning")
        return None, None, notes
    found = newest
    ranks.on_each(lambda: _check(found, config, data, model))
    ranks.on_each(lambda: _check_numerics(found, config, device, ranks))
    return found, copies if found is in_memory else None, notes


def _open_named(manager: CheckpointManager, path: Path, ranks: Ranks) -> Checkpoint:
    try:
        return manager.open(path)
    except CheckpointError as error:
        raise ranks.agreed(ConfigError(f"checkpoint.resume: {error}")) from None


def _check(checkpoint: Checkpoint, config: Config, data: Data, model: nn.Module) -> None:
    source = CheckpointSource(checkpoint)
    source.close()
    if found := differences(source, model, cast=False):
        raise ConfigError(
            f"{checkpoint.path}: is of another model: {found}. "
            "Use another run.dir, or the [model] that it was made with"
        )
    facts = read_extra(checkpoint)
    kind = facts.get("config", {}).get("optim", {}).get("kind", config.optim.kind)
    if kind != config.optim.kind:
        raise ConfigError(
            f"{checkpoint.path}: holds the state of optim.kind = {kind!r}, which "
            f"{config.optim.kind!r} cannot go on from. Use another run.dir, or that optimizer"
        )
    rules = facts.get("config", {}).get("optim", {}).get("adamw")
    if kind == "muon" and rules is not None and tuple(rules) != config.optim.adamw:
        raise ConfigError(
            f"{checkpoint.path}: was stepped with optim.adamw = {list(rules)}, which "
            f"{list(config.optim.adamw)} cannot go on from; leave it as it was"
        )
    if (facts["data"], facts["seed"]) != (data.fingerprint, config.run.seed):
        before, now = facts.get("config", {}).get("data", {}), config_as_dict(config)["data"]
        found = [
            f"data.{key} was {before.get(key)!r}, now {now.get(key)!r}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if facts["seed"] != config.run.seed:
            found.append(f"run.seed was {facts['seed']}, now {config.run.seed}")
        raise ConfigError(
            f"{checkpoint.path}: was trained on other data or in another order: "
            f"{'; '.join(found) or 'what data.source names has changed'}. "
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
