"""`shardwise plan --dry-run`: the engine itself takes two steps as rank 0 of N, in one process, and
what it holds and receives is compared with the plan, to the byte.

Ranks are those of torch's fake process group, which moves nothing: one process plays rank 0 of up
to 1,024. Tensors are real and have the sizes of that rank, so it takes the memory that the plan
says. Numbers mean nothing, sizes and events all. Rank 0 is a rank that owns most. Transport is
c10d.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import clip_grad_norm_, no_sync
from shardwise._torch_compat import DispatchMode, open_fake_group
from shardwise.bench.traffic import count_ours
from shardwise.engine.core.state import units_in
from shardwise.engine.services.inspect import gathered_bytes
from shardwise.errors import ConfigError
from shardwise.plan.walk import received_bytes
from shardwise.train.calling import outputs_of
from shardwise.train.config import Config, is_factory
from shardwise.train.hf.room import room_on
from shardwise.train.model import build_model, fill, plan_of, shard
from shardwise.train.optimizer import build_optimizer
from shardwise.train.planned import Planned, Traces, batch_of, step_of
from shardwise.units import text_of_bytes

MOST_RANKS = 1024
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Compared:
    """Bytes of one kind: as planned, and of the engine."""

    kind: str
    planned: int
    counted: int

    @property
    def is_equal(self) -> bool:
        return self.planned == self.counted


def dry_run(config: Config, ranks: int, search_dir: Path | None) -> list[Compared]:
    """Opens the default process group and closes it.

    Raises:
        ConfigError: it cannot be done here: memory, data of a function, too many ranks.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise ConfigError(f"--dry-run: expected 2 to {MOST_RANKS} devices (--gpus), found {ranks}")
    if config.mesh.tensor > 1:
        raise ConfigError("--dry-run: torch's tensor parallelism needs its own ranks; leave it out")
    if is_factory(config.data.source):
        raise ConfigError("--dry-run: data.source is a function; it makes its own batches only")
    config = replace(config, shard=replace(config.shard, transport="c10d"))
    model = build_model(config, search_dir)
    plan = plan_of(model, config, ranks, on_accelerator=False)
    planned = step_of(plan, config, ranks, Traces(model))
    peak, room = planned.walk.peak.total, room_on(_CPU)
    if peak > room:
        raise ConfigError(
            f"--dry-run: a rank needs {text_of_bytes(peak)}, {text_of_bytes(room)} are available "
            "here; take more ranks or a smaller micro-batch"
        )
    open_fake_group(ranks)
    try:
        with warnings.catch_warnings(action="ignore"):
            counted = _counted(model, config, ranks)
    finally:
        dist.destroy_process_group()
    return _compared(planned, counted, received_bytes(plan, planned.walk.events))


def _compared(planned: Planned, counted: dict[str, int], received: int) -> list[Compared]:
    expected = planned.walk.most | {"received": received}
    return [Compared(kind, expected[kind], found) for kind, found in counted.items()]


def _counted(model: nn.Module, config: Config, ranks: int) -> dict[str, int]:
    shard(model, config, _CPU, ranks)
    fill(model, config, _CPU)
    optimizer: Any = build_optimizer(model, config.optim, whole=config)
    batches = max(1, config.train.global_batch // (config.train.micro_batch * ranks))
    defers = units_in(model)[0].strategy.defers_reduction
    model.train()

    def backward() -> None:
        for number in range(batches):
            if defers and number < batches - 1:
                with no_sync(model):
                    outputs_of(model, batch_of(config))["loss"].backward()
            else:
                outputs_of(model, batch_of(config))["loss"].backward()

    with _Gathered(model) as gathered:
        backward()
    found = _held(model)
    if config.train.grad_clip:
        clip_grad_norm_(model.parameters(), config.train.grad_clip)
    optimizer.step()
    inner = getattr(optimizer, "optimizer", optimizer)
    kept = [v for state in (*inner.state.values(), *optimizer.state.values())
            for name, v in state.items() if name != "step" and isinstance(v, Tensor)]  # fmt: skip
    once = {id(value): _local(value).nbytes for value in kept}
    optimizer.zero_grad()
    return {
        **found,
        "optimizer": sum(once.values()),
        "gathered": gathered.most,
        "received": count_ours(model, backward).total_bytes,
    }


class _Gathered(DispatchMode):
    """The most that is gathered at one time, looked at before and behind every operator."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model, self.most = model, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.most = max(self.most, gathered_bytes(self._model))
        return out


def _held(model: nn.Module) -> dict[str, int]:
    """At the end of a backward."""
    buckets = [bucket for unit in units_in(model) for bucket in unit.buckets]
    held = [b.registered for b in buckets] + [b.bucket for b in buckets if b.home]
    parameters = sum(each.buffer.nbytes for each in held if each is not None)
    grads = (p.grad for p in model.parameters() if p.grad is not None)
    return {"parameters": parameters, "gradients": sum(_local(g).nbytes for g in grads)}


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
