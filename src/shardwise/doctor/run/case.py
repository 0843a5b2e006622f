"""A run directory as it is read: of a run that is over, was killed or goes on. Nothing is written.

Only what stands in the files counts. A run of an older version has no log.jsonl and ranks.jsonl:
checks that need them say nothing, and the case says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.train.config import Config, CustomModelConfig
from shardwise.train.config_file import load_config
from shardwise.train.metrics import read_metrics
from shardwise.train.watch import NAMES

if TYPE_CHECKING:
    from shardwise.plan.model import PlannedModel
    from shardwise.train.hf.needs import Needs

_OF_START = (
    "ranks", "step", "threads", "cores", "buffer_bytes", "base_bytes", "room_bytes",
)  # fmt: skip
_OF_LINK = ("hosts", "bytes_per_s", "link_bytes", "link_s", "step_s", "hybrid_bytes")
_WARM_UP = 2  # first steps of a start, which are slower


@dataclass(frozen=True, slots=True)
class Predicted:
    """Bytes of a rank by the plan: of this run, and of the same job without sharding."""

    needs: Needs
    plan: PlannedModel
    auto_plan: PlannedModel  # with shard.unit = "auto"
    unsharded_bytes: int  # parameters, gradients and optimizer of the whole model


class Case:
    """ConfigError where the path is no run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            what = "is no directory" if path.exists() else "no such directory"
            raise ConfigError(f"{path}: {what}; name the run.dir of a job")
        if not (path / "config.toml").is_file():
            raise ConfigError(
                f"{path}: is no run directory (it has no config.toml); name the run.dir of a job"
            )
        try:
            self.loaded = load_config(path / "config.toml")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path / 'config.toml'}: cannot be read: {error}") from None
        self.config: Config = self.loaded.config
        self.all_rows = [_numbers_of(row) for row in self._read("metrics.jsonl")]
        self.rows = [row for row in self.all_rows if row["step"] > 0]
        self.log = self._read("log.jsonl")
        self.is_live = is_locked(path)

    def _read(self, name: str) -> list[dict[str, Any]]:
        try:
            rows = read_metrics(self.path / name)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path / name}: cannot be read: {error}") from None
        return [row for row in rows if _is_number(row["step"])]

    # -- what happened -----------------------------------------------------------------------------
    @cached_property
    def start(self) -> dict[str, Any]:
        """The newest; empty where none was recorded."""
        found = next((row for row in reversed(self.log) if row.get("event") == "start"), {})
        is_whole = all(_is_number(found.get(name)) for name in _OF_START)
        units = found.get("units")
        is_whole = is_whole and isinstance(units, list) and all(map(_is_unit, units))
        return found if is_whole else {}

    @cached_property
    def end(self) -> dict[str, Any]:
        """Of the newest start; empty where it has none."""
        for row in reversed(self.log):
            if row.get("event") == "start":
                break
            if row.get("event") == "end":
                return row
        return {}

    def events(self, name: str) -> list[dict[str, Any]]:
        """Of the newest start, in order."""
        found = []
        for row in reversed(self.log):
            if row.get("event") == "start":
                break
            if row.get("event") == name and _is_number(row.get("seconds")):
                found.append(row)
        return found[::-1]

    @cached_property
    def link(self) -> dict[str, Any]:
        """What the link between hosts took of a step, in the newest start that measured it."""
        found = next((row for row in reversed(self.log) if row.get("event") == "link"), {})
        return found if all(_is_number(found.get(name)) for name in _OF_LINK) else {}

    @property
    def num_ranks(self) -> int:
        return int(self.start.get("ranks", 0))

    @property
    def last_step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    @cached_property
    def steady(self) -> list[dict[str, Any]]:
        """Rows of the newest start, without its first steps."""
        rows = [row for row in self.rows if row.get("step_time_s", 0) > 0]
        return [row for row in rows if row["step"] > self.first_steady]

    @property
    def first_steady(self) -> int:
        """The last of the newest start's first steps."""
        return self.start.get("step", 0) + _WARM_UP

    @cached_property
    def by_rank(self) -> list[dict[str, Any]]:
        """Rows of ranks.jsonl that belong to `steady`, each with its step's time."""
        times = {row["step"]: row["step_time_s"] for row in self.steady}
        num, found = self.num_ranks, []
        for row in self._read("ranks.jsonl"):
            lists = [row.get(name) for name in NAMES]
            if times.get(row["step"]) and all(_are_numbers(each, num) for each in lists):
                found.append(row | {"step_time_s": times[row["step"]]})
        return found

    # -- what was to be expected -------------------------------------------------------------------
    @cached_property
    def predicted(self) -> Predicted | None:
        """None where the model is somebody's own, or is not there any more."""
        if isinstance(self.config.model, CustomModelConfig) or not self.num_ranks:
            return None
        try:
            return _predict(self.loaded.on(self.num_ranks).config, self.num_ranks)
        except (ShardwiseError, OSError):
            return None

    @property
    def growth_bytes(self) -> int:
        """The highest use of any rank, less what it had before its model was built."""
        peak = max((row.get("peak_memory_bytes", 0) for row in self.rows), default=0)
        return max(0, peak - self.start.get("base_bytes", peak))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_numbers(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(_is_number, values))


def _is_unit(value: Any) -> bool:
    return isinstance(value, dict) and _is_number(value.get("gathered_bytes")) and "name" in value


def _numbers_of(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if _is_number(value)}


def _predict(config: Config, num_ranks: int) -> Predicted:
    from dataclasses import replace

    from shardwise.train.hf.needs import needs_of_plan
    from shardwise.train.model import build_model, plan_of
    from shardwise.train.planned import Traces
    from shardwise.train.tensor_axis import part_of_rank

    built = build_model(config, None)
    model = part_of_rank(built, config)
    plan = plan_of(model, config, num_ranks)
    auto = replace(config, shard=replace(config.shard, unit="auto", overrides=()))
    needs = needs_of_plan(plan, config, num_ranks, Traces(model))
    whole = plan_of(
        built,
        replace(
            auto,
            shard=replace(auto.shard, strategy="no_shard"),
            mesh=replace(config.mesh, replicate=1, shard=-1, tensor=1),
        ),
        1,
    )
    return Predicted(needs, plan, plan_of(model, auto, num_ranks), whole.kept_bytes)


def is_locked(path: Path) -> bool:
    """Whether a job has the directory; a file in it where directories cannot be locked."""
    for place in (path, path / "lock"):
        with contextlib.suppress(OSError):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
    return False
