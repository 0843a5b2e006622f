"""`join`: ranks with unequal numbers of batches.

    rank 0   b0 b1 b2            stop: both end after b1, the first that anybody lacks
    rank 1   b0 b1               continue: rank 1 runs b1 again beside b2, as a shadow

Without it the rank that ran out leaves the others waiting in a gather (a named error at the wait
limit). Before each batch all ranks tell each other whether they have one: one small exchange.

A shadow runs the body of the loop like everybody else, on its last batch, so every collective in
it, clipping, optimizer and the user's own included, is issued by all ranks; its gradients go
nowhere and count as absent. Those of the others are weighted so that their sum is the mean over
the ranks that have data (`divide_by="contributing"`), or over all ("all"). `global_mean` divides
by tokens as always; a shadow has none.

The interface follows torch.distributed.algorithms.Join (`divide_by_initial_world_size`); running
the old batch again, instead of a list of collectives to shadow, is ours: the engine cannot know
what the user's loop does besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.nn as nn

from shardwise.comm.phases import Wire, phase_on
from shardwise.engine.core.context import Context
from shardwise.engine.core.gradients import USUAL, BucketGrads, Gradients, Route, Taken
from shardwise.engine.core.state import sharded_units, units_in
from shardwise.engine.core.unit import Unit
from shardwise.engine.mesh.axes import ShardMesh
from shardwise.engine.module import adopt_if_new
from shardwise.errors import EngineError

T = TypeVar("T")
_MISSING: Any = object()


class _Shares(Route):
    """Ranks have run out of data: a shadow's gradients count as absent, those of the others weigh
    more; where tokens are counted, they weigh by these already.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self.counts = bool(share)

    def put(self, gradients: Gradients, bucket: BucketGrads, found: Taken) -> None:
        if self.counts:
            bucket.put(self._weighted(gradients, found))
        else:
            bucket.skip(found)

    def accumulate(self, gradients: Gradients, bucket: BucketGrads, found: Taken) -> None:
        bucket.accumulate(self._weighted(gradients, found))

    def _weighted(self, gradients: Gradients, found: Taken) -> Taken:
        if not self.counts:
            return [(index, torch.zeros_like(grad)) for index, grad in found]
        if gradients.weight.is_counted:
            return found
        return [(index, grad * self._share) for index, grad in found]


class Join(Generic[T]):
    """An iterable over this rank's batches; see `join`."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        batches: Iterable[T],
        continues: bool,
        divides_by_all: bool,
        spare: T,
    ) -> None:
        self._contexts = _contexts(models)
        self._mesh, self._wire = _mesh_of(models)
        self._batches = batches
        self._continues, self._divides_by_all = continues, divides_by_all
        self._last = spare
        self.is_shadow = False
        self.num_contributing = self._mesh.world

    def __iter__(self) -> Iterator[T]:
        source = iter(self._batches)
        try:
            while True:
                batch = next(source, _MISSING) if not self.is_shadow else _MISSING
                has = self._exchange(batch is not _MISSING)
                if not (any(has) if self._continues else all(has)):
                    return
                self.num_contributing = sum(has)
                self.is_shadow = batch is _MISSING
                if not self.is_shadow:
                    self._last = batch
                self._weigh()
                yield self._last
        finally:
            self.is_shadow = False
            self._set_route(USUAL)

    def _weigh(self) -> None:
        if self.num_contributing == self._mesh.world:
            self._set_route(USUAL)
            return
        for unit in self._units():  # on all ranks, whether this one has a batch or not
            if not isinstance(unit.gradients.route, _Shares) and unit.gradients.route is not USUAL:
                raise EngineError(
                    f"{unit.name}: join() in a reproducible run; the run itself sees to ranks that "
                    "have fewer micro-batches than others"
                )
        share = 1.0 if self._divides_by_all else self._mesh.world / self.num_contributing
        self._set_route(_Shares(0.0 if self.is_shadow else share))

    def _set_route(self, route: Route) -> None:
        for unit in self._units():
            if unit.gradients.route is USUAL or isinstance(unit.gradients.route, _Shares):
                unit.gradients.route = route

    def _units(self) -> list[Unit]:
        return [unit for context in self._contexts for unit in context.units]

    def _exchange(self, has: bool) -> list[bool]:
        """Who has a batch, by rank of the mesh. Raises on all ranks when one never had any."""
        mesh = self._mesh
        if mesh.world == 1:
            return [has]
        own = mesh.replicate.rank * mesh.shard.size + mesh.shard.rank
        flags = [False] * (2 * mesh.world)
        flags[own] = has
        flags[mesh.world + own] = not has and self._continues and self._last is _MISSING
        with phase_on([self._wire], "join", ""):
            agreed = self._wire.transport.agree(flags)
        has_batch, has_none = agreed[: mesh.world], agreed[mesh.world :]
        if any(has_none) and any(has_batch):
            lacking = [rank for rank, lacks in enumerate(has_none) if lacks]
            raise ValueError(
                f"join: ranks {lacking} of the mesh have no batch at all, so there is nothing that "
                "they could run beside the others; pass spare=, a batch of the usual shape "
                "(its gradients go nowhere), or give every rank data"
            )
        return has_batch


def join(
    model: nn.Module | Sequence[nn.Module],
    batches: Iterable[T],
    *,
    mode: Literal["stop", "continue"] = "stop",
    divide_by: Literal["contributing", "all"] = "contributing",
    spare: T = _MISSING,
) -> Join[T]:
    """Iterate over batches of which the ranks have unequal numbers.

        for batch in shardwise.join(model, loader):
            loss_of(model(batch)).backward(); optimizer.step(); optimizer.zero_grad()

    Args:
        model: the sharded model, or all that the loop trains.
        batches: this rank's batches; read once from the start.
        mode: "stop": all ranks stop with the first that has no more. "continue": until the last;
            ranks without data run their last batch again, as shadows: their gradients go nowhere.
        divide_by: gradients are divided by the number of ranks that had a batch, or by that of all.
        spare: what a rank runs that never had a batch; without it that is a ValueError on all
            ranks.

    Returns:
        An iterable with `is_shadow` (leave this rank's loss out of averages) and
        `num_contributing`. Break out of the loop on all ranks alike.
    """
    if mode not in ("stop", "continue"):
        raise ValueError(f"join: mode must be 'stop' or 'continue', found {mode!r}")
    if divide_by not in ("contributing", "all"):
        raise ValueError(f"join: divide_by must be 'contributing' or 'all', found {divide_by!r}")
    models = [model] if isinstance(model, nn.Module) else list(model)
    return Join(models, batches, mode == "continue", divide_by == "all", spare)


def _contexts(models: Sequence[nn.Module]) -> list[Context]:
    found = []
    for model in models:
        adopt_if_new(model)
        found += [unit.context for unit in sharded_units(model)]
    return list({id(context): context for context in found}.values())


def _mesh_of(models: Sequence[nn.Module]) -> tuple[ShardMesh, Wire]:
    """The mesh over which gradients are averaged; the same number of ranks for all units."""
    units = [unit for model in models for unit in units_in(model)]
    first = units[0]
    for unit in units:
        if unit.mesh.world != first.mesh.world:
            raise NotImplementedError(
                f"join: unit {first.name!r} averages over {first.mesh.world} ranks, unit "
                f"{unit.name!r} over {unit.mesh.world}; use one set of ranks for all units"
            )
    return first.mesh, Wire.of(first.transport)
