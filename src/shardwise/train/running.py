"""A running job: what it consists of, and one forward of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.manager import CheckpointManager
from shardwise.checkpoint.memory import MemoryCopies
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import ConfigError
from shardwise.train.best import Best
from shardwise.train.calling import outputs_of
from shardwise.train.config import Config
from shardwise.train.console import Console
from shardwise.train.data import Data
from shardwise.train.link import Link
from shardwise.train.metrics import MetricsFile
from shardwise.train.record import Record
from shardwise.train.replica import Replica
from shardwise.train.stop import StopRequest
from shardwise.train.tensor_axis import DataRanks
from shardwise.train.trackers import Trackers
from shardwise.train.watch import Watch


@dataclass(slots=True)
class Job:
    """Everything a running job consists of; `step` and `position` are what it has done so far,
    `saved_step` what of it is on disk."""

    config: Config
    ranks: Ranks
    device: torch.device
    data: Data
    model: nn.Module
    optimizer: torch.optim.Optimizer
    checkpoints: CheckpointManager
    copies: MemoryCopies | None
    metrics: MetricsFile | None
    console: Console
    stop: StopRequest
    trackers: Trackers
    best: Best
    watch: Watch
    record: Record | None  # on rank 0
    best_checkpoints: CheckpointManager | None
    tokenizer: Any = None  # of `log.samples`
    mfu_per_hz: float | None = None  # a step's share of the device's arithmetic, times its seconds
    step: int = 0
    position: int = 0
    loss: float | None = None  # of the step before
    saved_step: int = 0
    link: Link | None = None  # between hosts, until its cost is told
    replica: Replica | None = None  # one of several jobs that meet

    @property
    def data_ranks(self) -> DataRanks:
        return DataRanks.of(self.config, self.ranks)


def forward(job: Job, batch: Any) -> dict[str, Tensor]:
    """What the model says of a batch: its loss and what else it logs. What a model takes or returns
    is mostly wrong on all ranks alike, at once."""
    try:
        return outputs_of(job.model, to_device(batch, job.device))
    except ConfigError as error:
        raise job.ranks.agreed(error, 0 if job.position == 0 else job.ranks.rank) from None


def to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {k: to_device(v, device) for k, v in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(v, device) for v in batch)
    return batch
