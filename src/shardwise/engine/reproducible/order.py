"""Gradients of a step, summed in tree order over its micro-batches (`layout.tree`).

A `SumOrder` is shared by the units of a model while a `reproducible` run is on. It says which
micro-batches the ranks compute in this round. Each backward of a round then hands its gradients to
the transport as leaves (`TreeTransport.collect`); nothing reaches `.grad` before the last round,
which completes the trees, divides by the number of micro-batches, and delivers as usual.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.comm.transport import Missing
from shardwise.comm.tree_sum import TreeSum, sums_in_tree
from shardwise.engine.core.bucket import BucketState
from shardwise.engine.core.gradients import BucketGrads, Gradients, Route
from shardwise.engine.core.parameter import ShardedParam
from shardwise.engine.core.reduction import Reduction
from shardwise.engine.core.weight import Scale
from shardwise.errors import EngineError
from shardwise.layout.tree import Holdings, Schedule

if TYPE_CHECKING:
    from shardwise.engine.core.unit import Unit

_UNSCALED = Scale(1.0, 1.0)


class SumOrder(Route):
    """Where a step is: its schedule, and the round that runs now. The route of all its units."""

    refuses_counts = (
        "global_mean() in a reproducible run: gradients are the mean over micro-batches there, "
        "each with the weight 1; let each micro-batch hold equally many tokens and call "
        "backward() on its mean"
    )

    def __init__(self, units: list[Unit], schedule: Schedule, replica: int, shard: int) -> None:
        self._units = [weakref.ref(u) for u in units]
        self._params: dict[int, ShardedParam] = {}
        self.schedule, self.replica, self.shard = schedule, replica, shard
        self.round = -1  # outside of a step
        self.reduced: set[int] = set()  # ids of the BucketGrads that were issued in this round
        self.is_broken = False
        self._trees: weakref.WeakKeyDictionary[BucketGrads, TreeSum] = weakref.WeakKeyDictionary()

    @property
    def is_running(self) -> bool:
        return self.round >= 0

    @property
    def is_last(self) -> bool:
        return self.round == self.schedule.num_rounds - 1

    @property
    def leaf(self) -> int | None:
        """The micro-batch of this rank; None: a spare pass."""
        return self.schedule.leaf(self.round, self.replica, self.shard)

    def leaves(self, state: BucketState) -> tuple[int | None, ...]:
        """The micro-batches of this round on the ranks of a bucket's shard axis."""
        if self._is_whole(state):
            return (self.leaf,)
        return self.schedule.leaves(self.round, self.replica)

    def holdings(self, state: BucketState) -> tuple[Holdings, int]:
        """What the ranks of a bucket's replicate axis hold in the end; which one this is."""
        if self._is_whole(state):
            return self.schedule.by_rank, self.replica * self.schedule.shards + self.shard
        return self.schedule.by_replica, self.replica

    def _is_whole(self, state: BucketState) -> bool:
        """Parameters without dims are whole on every rank, also of a sharded model."""
        return state.mesh.shard.size != self.schedule.shards

    @property
    def spare_index(self) -> int:
        """What a rank without a micro-batch runs: the first of its replica, or of all."""
        span = self.schedule.span(self.replica)
        return span.start if span else 0

    def begin_round(self, number: int) -> None:
        self.round = number
        self.reduced.clear()
        if number == 0:
            self.is_broken = False

    def param_of(self, p: torch.Tensor) -> ShardedParam | None:
        """What the engine knows of a registered parameter; None for one that it does not manage."""
        known = self._params.get(id(p))
        if known is None or known.sharded is not p:
            self._params = {id(x.sharded): x for u in self.units for x in u.params}
            known = self._params.get(id(p))
        return known

    @property
    def units(self) -> list[Unit]:
        return [u for ref in self._units if (u := ref()) is not None]

    def end_step(self) -> None:
        self.round = -1

    def failed(self) -> None:
        self.is_broken = self.is_running

    def drop_sums(self) -> None:
        """Whatever a step has left."""
        self._trees.clear()

    def holds_sums(self, gradients: Gradients) -> bool:
        return self.is_last and any(bucket in self._trees for bucket in gradients.buckets)

    def issue(
        self, gradients: Gradients, bucket: BucketGrads, *, joins: Missing | None
    ) -> OrderedReduction:
        """The reduction of what a bucket collected in this round."""
        state = bucket.state
        self.admit(bucket)
        buffer, out, layout, had = bucket.take(_UNSCALED, joins=joins)
        assert state.bucket is not None
        tree = self._trees.get(bucket)
        if tree is None:
            holdings, replica = self.holdings(state)
            tree = self._trees[bucket] = TreeSum(layout, state.mesh.shard.rank, holdings, replica)
        elif tree.layout is not layout:
            raise EngineError(
                f"{state.name}: requires_grad changed between the micro-batches of a step; change "
                "it between steps"
            )
        if self.is_last:
            del self._trees[bucket]  # a later step begins anew, whatever becomes of this one
        # A spare pass says nothing about who has a gradient: the counts do.
        had = tuple(has and self.leaf is not None for has in had)
        transport = state.transport
        assert sums_in_tree(transport), "checked when the run began"
        with state.streams.lane("reduce"):
            handle = transport.collect(state.bucket, buffer, out, tree, self.leaves(state))
            reduction = OrderedReduction(bucket, handle, out, layout, had, self.is_last)
            reduction.tree, reduction.num_leaves = tree, self.schedule.num_micro_batches
            if self.is_last and layout.world == 1:
                reduction.start_all_reduce()  # nothing to wait for before
        return reduction

    def admit(self, grads: BucketGrads) -> None:
        """A backward reduces now: is it one that the run knows of?"""
        unit_name = grads.state.unit().name
        if not self.is_running:
            raise EngineError(
                f"{unit_name}: a backward outside of run.micro_batches(step), in a reproducible "
                "run; its gradients have no place in the sum. Compute losses inside the loop over "
                "micro-batches, or leave the `with reproducible(...)` block before"
            )
        if self.is_broken:
            raise EngineError(
                f"{unit_name}: an exception ended an earlier micro-batch of this step, so its sums "
                "are incomplete; clear the gradients and start the step again with "
                "run.micro_batches(step)"
            )
        if id(grads) in self.reduced:
            raise EngineError(
                f"{unit_name}: its gradients were reduced twice in one micro-batch (two backwards, "
                "or a part of the model that runs again later); add the losses up and call "
                "backward() once"
            )
        self.reduced.add(id(grads))


def order_of(p: torch.Tensor) -> SumOrder | None:
    """The run that a parameter takes part in."""
    mark = getattr(p, "_mark", None)
    return mark.sum_order if mark is not None else None


@dataclass(slots=True)
class OrderedReduction(Reduction):
    """One round of a bucket on its way; the last one also completes and delivers."""

    tree: TreeSum | None = None
    num_leaves: int = 1

    def start_all_reduce(self) -> None:
        state = self.grads.state
        assert state.bucket is not None and self.tree is not None
        transport = state.transport
        assert sums_in_tree(transport)
        self.over_replicas = transport.complete(state.bucket, self.tree)

    def finish(self, *, run_hooks: bool = True) -> None:
        self.advance()
        if not self.all_reduce:  # another round follows
            self.grads.tally.delivered += 1
            return
        assert self.over_replicas is not None and self.tree is not None
        self.over_replicas.wait()
        assert self.tree.result is not None
        # + 0.0: a missing part and one of zeros differ by the sign of zero, so there is none.
        self.out = self.tree.result.add_(0.0).div_(float(self.num_leaves))
        home = self.grads.state.home
        if home is not None:
            self.out, self.layout = home.cut(self.out, self.layout)
        self._deliver(run_hooks)
