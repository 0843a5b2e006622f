"""The run directory: one job at a time, and what it holds.

config.toml     the effective configuration
metrics.jsonl   one row a step
checkpoints/    step_%08d/
best/           the one of the lowest val_loss (`checkpoint.best`)
loss.png, tensorboard/, profile/    what people look at (`trackers/`, `profiling`)
cache/          text as tokens, only where the user's cache folder cannot be written
model/          the trained model as transformers loads it (model.kind hf)
lock            only where the file system cannot lock directories
memory_id       which copies in memory are this run's (`memory`)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Any

from shardwise.checkpoint.store import MANIFEST, Checkpoint, list_checkpoints, read_checkpoint
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.best import Best
from shardwise.train.config import Config, HFModelConfig
from shardwise.train.config_file import config_as_dict, load_config
from shardwise.train.metrics import read_metrics


class RunDir:
    """Paths of a run directory, and the lock on it."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir).expanduser()
        self.config_file = self.path / "config.toml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best"
        self.model = self.path / "model"
        self.profile = self.path / "profile"
        self._descriptor: int | None = None
        self._was_begun = self.config_file.exists()

    def check(self) -> None:
        """Refuses a path that cannot become a run directory; writes nothing."""
        existing = self.path.resolve()
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            raise ConfigError(f"run.dir: {existing} is not a directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            where = "" if existing == self.path.resolve() else f" in {existing}"
            raise ConfigError(f"run.dir: {self.path} cannot be written (no permission{where})")

    def lock(self, patience_s: float = 5.0) -> None:
        """Keeps other jobs out until `unlock` or the end of this process.

        A job that was just killed gets `patience_s` to end.
        The directory itself is locked, so that a refused job leaves no file behind; a file in it
        where the file system cannot lock directories (NFS). Locks end with the process.
        """
        if not self.path.is_dir() or self._descriptor is not None:
            return
        deadline = time.monotonic() + patience_s
        try:
            self._take(os.open(self.path, os.O_RDONLY), deadline)
        except OSError:
            self.unlock()
            with contextlib.suppress(OSError):  # none at all there: then it goes unlocked
                self._take(os.open(self.path / "lock", os.O_RDWR | os.O_CREAT), deadline)

    def _take(self, descriptor: int, deadline: float) -> None:
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=self.unlock)  # whoever outlives us does not hold it
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"run.dir: {self.path} is in use by another job{_holder(descriptor)}; stop "
                        "that, or use another"
                    ) from None
                time.sleep(0.1)

    def unlock(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def create(self) -> None:
        """Makes it, and locks it where it was not there before."""
        was_locked = self._descriptor is not None
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run.dir: {self.path} cannot be made: {error.strerror}") from None
        self.lock()
        if not (was_locked or self._was_begun) and self.config_file.exists():
            raise ConfigError(
                f"run.dir: another job has begun in {self.path} since this one started; start "
                "again to go on from it, or use another"
            )

    def changed_keys(self, config: Config) -> list[str]:
        """Keys that differ from the run's own config.toml; those of a file that cannot be read
        count not."""
        try:
            before = config_as_dict(load_config(self.config_file).config)
        except ConfigError:
            return []
        now = config_as_dict(config)
        return [
            f"{section}.{key}"
            for section in now
            for key in sorted(now[section].keys() | before[section].keys())
            if now[section].get(key) != before[section].get(key)
        ]


def _holder(descriptor: int) -> str:
    """Which process of this host has the lock, where the kernel tells."""
    inode = f":{os.fstat(descriptor).st_ino}"
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 1234 08:02:5678 0 EOF
            if words[1] == "FLOCK" and words[5].endswith(inode):
                return f" (process {words[4]})"
    return ""


def check_named(config: Config) -> None:
    """A checkpoint that the user names must be one, whether it is needed or not."""
    if config.checkpoint.resume in ("auto", "off"):
        return
    try:
        read_checkpoint(Path(config.checkpoint.resume).expanduser())
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.resume: {error}") from None


def finished(config: Config) -> str:
    """What to tell the user whose run has reached its last step already; empty if there is work to
    do."""
    run_dir = RunDir(config)
    newest: Checkpoint | None = next(iter(list_checkpoints(run_dir.checkpoints).complete), None)
    if config.checkpoint.resume == "off" or newest is None:
        return ""
    rows = [r for r in read_metrics(run_dir.metrics_file) if r["step"] <= newest.step]
    best = Best.of_rows(rows)
    ended_early = best.has_lost(config.train.patience)
    if newest.step < config.train.steps and not ended_early:
        return ""
    changed = run_dir.changed_keys(config)
    if any(key.startswith(("model.", "data.", "run.seed")) for key in changed):
        return ""  # not this run: let the resume check say what differs
    if ended_early:
        return (
            f"{run_dir.path} ended early at step {newest.step} of {config.train.steps}: {best}; "
            "raise train.patience to go on, or choose another run.dir"
        )
    losses: list[Any] = [r["val_loss"] for r in rows if "val_loss" in r]
    result = f" (val_loss {losses[-1]:.4f})" if losses else ""
    return (
        f"{run_dir.path} is complete: step {newest.step} of {config.train.steps}{result}; "
        "raise train.steps to go on, or choose another run.dir"
    )


def lacks_model(config: Config) -> bool:
    """Whether a run that is complete ended before it had written the model of its last step."""
    run_dir = RunDir(config)
    newest = next(iter(list_checkpoints(run_dir.checkpoints).complete), None)
    if newest is None or not isinstance(config.model, HFModelConfig):
        return False
    try:
        written_ns = run_dir.model.stat().st_mtime_ns
    except OSError:
        written_ns = 0
    is_older = written_ns < (newest.path / MANIFEST).stat().st_mtime_ns
    return is_older and config.checkpoint.export
