"""Strategies are values: what each mesh axis does to parameter, gradient and optimizer state.

                     shard axis                       replicate axis   gathered copy lives
    no_shard         absent (size 1)                  everything       the shard is the whole
    shard_optimizer  optimizer, gradient              -                until the shards are written
    shard_grad_op    optimizer, gradient              -                until the shards are written
    full_shard       parameter, gradient, optimizer   -                for one use
    hybrid_shard     as full_shard                    everything       for one use
    hybrid_full_optimizer   as full_shard             parameter        for one use

`shard_optimizer` differs from `shard_grad_op` in one thing: between micro-batches its gradient is a
partial sum on every rank, so that one reduction serves the whole step. `hybrid_full_optimizer`
replicates only what waits for use; gradient and optimizer state are sharded over the replicate axis
too, and so is the registered parameter, which always lies like the optimizer state. Ideas: ZeRO
(Rajbhandari et al. 2020, arXiv 1910.02054), the placements-per-axis view and HFSDP of
Megatron-FSDP; FSDP2's `reshard_after_forward=False | int` are two more points of the space.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from shardwise.units import STRATEGY_ALIASES, full_name


class Placed(StrEnum):
    """How one tensor lies on one mesh axis."""

    SHARD = "shard"
    REPLICATE = "replicate"
    PARTIAL = "partial"  # a sum that still has to be reduced over the axis; gradients only


class Lifetime(StrEnum):
    """How long the gathered copy of a unit's parameters lives."""

    USE = "use"  # released after each forward and each backward
    PASS = "pass"  # kept from forward to the end of backward
    CLEAN = "clean"  # kept until somebody writes to the shards


@dataclass(frozen=True, slots=True)
class AxisPlacement:
    """One row of the table above, for one mesh axis."""

    parameter: Placed
    gradient: Placed
    optimizer: Placed


_SHARDED = AxisPlacement(Placed.SHARD, Placed.SHARD, Placed.SHARD)
_REPLICATED = AxisPlacement(Placed.REPLICATE, Placed.REPLICATE, Placed.REPLICATE)


@dataclass(frozen=True, slots=True)
class Strategy:
    """What is sharded where, and how long a gathered copy lives.

    `shard` is the placement on the shard axis (None: the strategy has none, every rank holds
    everything). `forward_world` > 0 keeps, between forward and backward, shards over that many
    ranks instead of all of them.
    """

    name: str
    shard: AxisPlacement | None
    replicate: AxisPlacement | None
    lifetime: Lifetime
    forward_world: int = 0

    @property
    def defers_reduction(self) -> bool:
        """Whether micro-batches before the last one should run under `no_sync`: each rank holds
        whole gradients anyway, so one reduction may serve the step (ZeRO-1, DDP).
        """
        return self.shard is None or self.shard.gradient is Placed.PARTIAL

    @property
    def splits_replicas(self) -> bool:
        """True when replicas share out the optimizer state of their common shard (HFSDP)."""
        return self.is_hybrid and self.replicate.optimizer is Placed.SHARD  # type: ignore[union-attr]

    @property
    def is_hybrid(self) -> bool:
        """True when it takes both axes."""
        return self.shard is not None and self.replicate is not None

    def with_lifetime(self, lifetime: Lifetime, forward_world: int = 0) -> Strategy:
        return replace(self, lifetime=lifetime, forward_world=forward_world)


_WHOLE_KEPT = AxisPlacement(Placed.REPLICATE, Placed.SHARD, Placed.SHARD)
_WHOLE_KEPT_PARTIAL = AxisPlacement(Placed.REPLICATE, Placed.PARTIAL, Placed.SHARD)

STRATEGIES: dict[str, Strategy] = {
    s.name: s
    for s in (
        Strategy("no_shard", None, _REPLICATED, Lifetime.CLEAN),
        Strategy("shard_optimizer", _WHOLE_KEPT_PARTIAL, None, Lifetime.CLEAN),
        Strategy("shard_grad_op", _WHOLE_KEPT, None, Lifetime.CLEAN),
        Strategy("full_shard", _SHARDED, None, Lifetime.USE),
        Strategy("hybrid_shard", _SHARDED, _REPLICATED, Lifetime.USE),
        Strategy("hybrid_full_optimizer", _SHARDED, _WHOLE_KEPT, Lifetime.USE),
    )
}


def strategy_named(name: str | Strategy) -> Strategy:
    """The strategy of a name or alias (`zero3`, `ZeRO-3`); a `Strategy` is passed through."""
    if isinstance(name, Strategy):
        return name
    plain = full_name(str(name))
    if plain not in STRATEGIES:
        known = ", ".join([*STRATEGIES, *STRATEGY_ALIASES])
        raise ValueError(f"unknown strategy {name!r}; choose one of {known}")
    return STRATEGIES[plain]
