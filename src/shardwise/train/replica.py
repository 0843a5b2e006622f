"""A job as one of several replicas that meet through `shardwise replicas` (see `replicas`).

    theta -> this rank's shards; a copy of them in float32 on the host
    ... so many steps of this job alone ...
    theta - shards -> the coordinator -> the next theta -> the shards

The inner optimizer keeps its state. A resumed job begins from the theta of the round that goes on:
its own steps since the last meeting are lost, those of others are not.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import mark_dirty
from shardwise.checkpoint.placement import local_part
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import ShardwiseError, TransportError
from shardwise.replicas.member import Member, Start
from shardwise.train.config import Config
from shardwise.train.stop import StopRequest
from shardwise.units import counted


class Replica:
    """Of one rank. `left`: steps until it meets the others."""

    def __init__(self, config: Config, model: nn.Module, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._theta: list[Tensor] = []
        self._member = Member(
            config.replicas.coordinator,
            name=name_of(config),
            rank=ranks.rank,
            world=ranks.world_size,
            seed=config.run.seed,
            shapes={name: tuple(param.shape) for name, param in self._params},
            boxes=[(name, local_part(param, name)[1]) for name, param in self._params],
            form=config.replicas.wire,
        )
        self.left = 0
        self.number = 0

    @classmethod
    def joined(
        cls, config: Config, model: nn.Module, ranks: Ranks, stop: StopRequest, notes: list[str]
    ) -> Replica | None:
        """Among the others, with their weights; None for a job that is alone. A collective."""
        if not config.replicas.coordinator:
            return None
        replica = cls(config, model, ranks)
        shards = replica._shards
        start = ranks.on_each(
            lambda: replica._met(lambda: replica._member.join(shards, lambda: stop.by)),
            "joining replicas",
        )
        replica._take(start)
        others = counted(start.replicas, "replica")
        notes.append(
            f"one of {others} ({name_of(config)}) in round {start.number}, from their weights; "
            f"they meet every {counted(start.steps, 'step')}"
        )
        return replica

    @property
    def _shards(self) -> list[Tensor]:
        return [local_part(param, name)[0] for name, param in self._params]

    def step(self) -> dict[str, Any]:
        """A step of the job is over; what to log if the replicas have met. A collective."""
        self.left -= 1
        if self.left > 0:
            return {}
        differences = [
            theta - shard.to("cpu", torch.float32)
            for theta, shard in zip(self._theta, self._shards, strict=True)
        ]
        start = self._ranks.on_each(
            lambda: self._met(lambda: self._member.exchange(differences)), "meeting other replicas"
        )
        self._take(start)
        return {"round": start.number, "replicas": start.replicas}

    def _met(self, call: Callable[[], Start]) -> Start:
        """A coordinator that is lost is no rank of this job that has failed."""
        try:
            return call()
        except TransportError as error:
            raise ShardwiseError(str(error)) from error

    @torch.no_grad()
    def _take(self, start: Start) -> None:
        """The shards become those of theta."""
        numbers = set(self._ranks.on_all(lambda: start.number))
        if len(numbers) > 1:
            raise self._ranks.agreed(
                TransportError(f"ranks were told of rounds {sorted(numbers)}; start this job again")
            )
        self._theta = [theta.clone() for theta in start.theta]
        for shard, theta in zip(self._shards, self._theta, strict=True):
            shard.copy_(theta)
        mark_dirty(self._model)
        self.left, self.number = start.steps, start.number

    def leave(self, *, in_order: bool) -> None:
        """The others go on without this one."""
        if in_order:
            self._member.leave()
        self._member.close()


def name_of(config: Config) -> str:
    run_dir = Path(config.run.dir).resolve()
    return config.replicas.name or f"{socket.gethostname()}:{run_dir}"
