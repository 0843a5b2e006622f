"""`run.reproducible`: what a job does so that its numbers can be had again.

    off          nothing
    same_world   kernels that may differ from run to run are errors, and so are samples that differ
                 from read to read; a resume must have the same ranks, threads, torch and processor
    any_world    the same, on any number of ranks: `shardwise.reproducible` around the steps, and
                 evaluation cut by index

The random streams of a rank continue from its checkpoint under `same_world`; under `any_world`
every micro-batch has its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.ranks import Ranks
from shardwise.engine.core.state import sharded_units
from shardwise.engine.reproducible.checks import check_run, numerics_of
from shardwise.engine.reproducible.run import (
    ReproducibleRun,
    reproducible,
    restore_deterministic,
    set_deterministic,
    set_streams,
    stream_seed,
)
from shardwise.errors import ConfigError
from shardwise.train.config import Config
from shardwise.train.data import Data
from shardwise.train.order import SampleOrder

_NUM_READ = 8  # samples that are read twice at the start


def set_up(config: Config) -> None:
    """Before anything is computed: threads, and what cuBLAS reads when it starts."""
    if config.run.reproducible != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    threads = config.run.threads
    if not threads and config.run.reproducible == "any_world":
        threads = 1  # cores / ranks would make results depend on the number of ranks
    if threads:
        torch.set_num_threads(threads)


def settings(config: Config) -> tuple[int, int]:
    """Micro-batches of a step over all ranks, and the seed."""
    return config.train.global_batch // config.train.micro_batch, config.run.seed


def check(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """ConfigError for what would break `any_world`. Collective."""
    if config.run.reproducible != "any_world":
        return
    try:
        check_run(model, sharded_units(model), optimizer, settings(config))
    except ValueError as error:
        raise ConfigError(f"run.reproducible: {error}") from None


def check_data(config: Config, data: Data, ranks: Ranks) -> None:
    """ConfigError where a sample is another one when it is read again, or on another rank.

    Looks at the first samples of the run. Before each, random streams are set as a step sets them:
    samples may draw from those. Collective.
    """
    if config.run.reproducible == "off":
        return
    num = min(_NUM_READ, config.train.micro_batch)
    indices = SampleOrder(len(data.train), config.run.seed).indices(0, num)

    def read() -> list[str]:
        found = []
        for at in range(num):
            set_streams(config.run.seed)
            found.append(_digest(data.train.batch(indices[at : at + 1])))
        return found

    all_read = ranks.on_all(lambda: (read(), read()))
    for rank, (first, again) in enumerate(all_read):
        for at, index in enumerate(indices):
            if first[at] == again[at] == all_read[0][0][at]:
                continue
            how = "when it is read again" if first[at] != again[at] else f"on rank {rank}"
            text = (
                f"data.source: sample {index} is another one {how}; under run.reproducible a "
                "sample may depend on its index and on the streams of torch, random and numpy only"
            )
            raise ranks.agreed(ConfigError(text))


def _digest(batch: Any) -> str:
    """Of all that a batch holds."""
    digest = hashlib.sha256()

    def take(value: Any) -> None:
        digest.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype}{list(value.shape)}".encode())
            digest.update(value.detach().flatten().contiguous().view(torch.uint8).numpy().data)
        elif isinstance(value, dict):
            for key, item in value.items():
                digest.update(repr(key).encode())
                take(item)
        elif isinstance(value, list | tuple):
            for item in value:
                take(item)
        else:
            digest.update(repr(value).encode())

    take(batch)
    return digest.hexdigest()


@contextlib.contextmanager
def reproducing(
    config: Config, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[ReproducibleRun | None]:
    """Around all steps; gives the run under `any_world`."""
    if config.run.reproducible == "any_world":
        num, seed = settings(config)
        with reproducible(model, optimizer, num_micro_batches=num, seed=seed) as run:
            yield run
    elif config.run.reproducible == "same_world":
        before = set_deterministic()
        try:
            yield None
        finally:
            restore_deterministic(before)
    else:
        yield None


def begin_evaluation_batch(config: Config, step: int, at: int) -> None:
    """Gives batch `at` of an evaluation random streams of its own, whichever rank runs it."""
    if config.run.reproducible == "any_world":
        num, seed = settings(config)  # of the step; the stream `num` is what follows it
        set_streams(stream_seed(seed, step, num + 1 + at))


# -- across a resume -----------------------------------------------------------------------------
def facts(config: Config, device: torch.device, world_size: int) -> dict[str, Any]:
    """What the bits of this job depend on beside its configuration; kept in every checkpoint."""
    found = {**numerics_of(device), "reproducible": config.run.reproducible}
    return {**found, "ranks": str(world_size)}


def changes(
    config: Config, saved: dict[str, Any] | None, device: torch.device, ranks: Ranks
) -> list[str]:
    """What stands against continuing a checkpoint with the same numbers."""
    level = config.run.reproducible
    if level == "off" or saved is None:
        return []
    now = facts(config, device, ranks.world_size)
    ignored = {"reproducible"} | ({"ranks"} if level == "any_world" else set())
    keys = sorted((now.keys() | saved.keys()) - ignored)
    found = [f"{k} {saved.get(k)} -> {now.get(k)}" for k in keys if saved.get(k) != now.get(k)]
    if saved["reproducible"] != level and saved["reproducible"] != "any_world":
        found.append(f"run.reproducible {saved['reproducible']} -> {level}")
    return found
