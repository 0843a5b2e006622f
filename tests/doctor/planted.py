"""Jobs with a fault each: models and data that a user could have written so."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from shardwise import set_wait_limit
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import TrainingError
from shardwise.train.config_file import load_config
from shardwise.train.job import train

TINY = {
    "model.dim": 32, "model.layers": 2, "model.heads": 2, "data.seq_len": 32,
    "train.global_batch": 8, "train.micro_batch": 4, "train.steps": 12, "train.eval_every": 4,
    "train.eval_samples": 8, "optim.warmup_steps": 2, "checkpoint.every": 0,
}  # fmt: skip
OWN = {
    "model.kind": "planted:plain", "data.source": "planted:points", "train.global_batch": 8,
    "train.micro_batch": 4, "train.steps": 12, "train.eval_every": 12, "train.eval_samples": 8,
    "optim.warmup_steps": 2, "checkpoint.every": 0,
}  # fmt: skip


class Killed(BaseException):
    """Nothing in a job expects it: the run is over without a word."""


class Never:
    by = ""


class KilledIn:
    def __init__(self, step: int) -> None:
        self._left = step

    @property
    def by(self) -> str:
        self._left -= 1
        if self._left == 0:
            raise Killed
        return ""


def run(rank: int, world: int, directory: Path, keys: dict[str, Any], killed_in: int = 0) -> None:
    """One rank of a job; a loss that is no number is what some are there for."""
    values = dict(keys)
    if "data.source" not in values:
        values["data.source"] = str(text_file(directory.parent, rank))
    values |= {"run.dir": str(directory), "run.device": "cpu", "log.trackers": "none"}
    values.setdefault("run.threads", 1)
    pairs = [(key, str(v).lower() if isinstance(v, bool) else str(v)) for key, v in values.items()]
    stop: Any = KilledIn(killed_in) if killed_in else Never()
    with contextlib.suppress(Killed, TrainingError):
        train(load_config(None, pairs), Ranks(), torch.device("cpu"), stop)
    dist.barrier()


def text_file(folder: Path, rank: int) -> Path:
    path = folder / "text.txt"
    if rank == 0:
        words = ["shard", "gather", "reduce", "rank", "unit", "step"]
        path.write_text(" ".join(words[(i * i + i // 7) % len(words)] for i in range(20000)))
    dist.barrier()
    return path


# -- data ----------------------------------------------------------------------------------------
class Points(Dataset[Any]):
    """x in 8 dims and a sum to find; `before` is called for each sample that is asked for."""

    def __init__(self, before: Callable[[int], int] = lambda index: index) -> None:
        self._x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
        self._before = before

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self._x[self._before(int(index))]
        return x, x.sum(0, keepdim=True)


def points(section: Any) -> Any:
    return Points(), Points()


def slow(section: Any) -> Any:
    """Each sample is made when it is asked for."""

    def make(index: int) -> int:
        time.sleep(0.003)
        return index

    return Points(make), Points()


def slow_on_one(section: Any) -> Any:
    """One host's disk is slow."""

    def make(index: int) -> int:
        time.sleep(0.01 if dist.get_rank() == 1 else 0.0)
        return index

    return Points(make), Points()


def deaf(section: Any) -> Any:
    """Samples are drawn, by a generator that each rank seeds alike."""
    generator = torch.Generator().manual_seed(0)

    def draw(index: int) -> int:
        return int(torch.randint(256, (1,), generator=generator))

    return Points(draw), Points()


def noise(section: Any) -> Any:
    """Few samples without a rule, and many parameters."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(48, 8, generator=generator), torch.randn(48, 1, generator=generator)
    return TensorDataset(x[:16], y[:16]), TensorDataset(x[16:], y[16:])


def pauses(section: Any) -> Any:
    """One sample takes long on one rank, once."""
    paused: list[int] = []

    def pause(index: int) -> int:
        if dist.get_rank() == 1 and not paused:
            paused.append(index)
            time.sleep(4.0)
        return index

    return Points(pause), Points()


def run_compiled(rank: int, world: int, directory: Path, keys: dict[str, Any]) -> None:
    """By a backend that fuses nothing: which graphs there are is the same."""
    compile_ = nn.Module.compile
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with mock.patch.object(nn.Module, "compile", lambda self: compile_(self, backend="eager")):
            run(rank, world, directory, keys)
    finally:
        torch._dynamo.reset()


def run_warned(rank: int, world: int, directory: Path, keys: dict[str, Any]) -> None:
    set_wait_limit(60.0, warn_after=0.5)
    try:
        run(rank, world, directory, keys)
    finally:
        set_wait_limit(60.0, warn_after=30.0)


# -- models --------------------------------------------------------------------------------------
class Plain(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width),
                                  nn.Tanh(), nn.Linear(width, 1))  # fmt: skip

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (self.body(x) - y).square().mean()


def plain(options: dict[str, Any]) -> nn.Module:
    return Plain(options.get("width", 64))


def _burn(seconds: float) -> None:
    """Work for the processor: a thread that sleeps is no slow rank."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Slower(Plain):
    """Looks through all that it has seen."""

    calls = 0

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        _burn(0.001 * self.calls)
        return super().forward(batch)


class SlowOnOne(Plain):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        _burn(0.05 if os.environ.get("RANK", "") == "1" or dist.get_rank() == 1 else 0.01)
        return super().forward(batch)


class Keeps(Plain):
    """Remembers its outputs, and with them what they were computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        wide = batch[0].repeat(2**15, 4).requires_grad_()  # 16 MiB
        self.seen.append(wide.square().mean())
        return super().forward(batch)


class Table(Plain):
    """A table that is no parameter."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(25 * 2**20), persistent=False)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(batch) * self.table[0]


class Counts(Plain):
    """A number in an attribute, by which torch.compile tells graphs apart."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Counted() for _ in range(2)))
        self.end = nn.Linear(8, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        for unit in self.body:
            unit.calls += 1
        return (self.end(self.body(x)) - y).square().mean()


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 + self.calls / 1000)


def counts(options: dict[str, Any]) -> nn.Module:
    return Counts()


def slower(options: dict[str, Any]) -> nn.Module:
    return Slower()


def slow_rank(options: dict[str, Any]) -> nn.Module:
    return SlowOnOne()


def keeps(options: dict[str, Any]) -> nn.Module:
    return Keeps()


def table(options: dict[str, Any]) -> nn.Module:
    return Table()
