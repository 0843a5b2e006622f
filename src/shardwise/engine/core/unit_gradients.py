"""What one unit does with gradients: takes them in as they arrive, issues its reductions, settles
partial sums that somebody reads.

When that is to happen is decided in `backward`; how a bucket's gradients get from an accumulator to
`.grad` is in `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from shardwise.comm.phases import Wire, phase_on
from shardwise.comm.transport import Missing
from shardwise.engine.core.gradients import BucketGrads, Reduction
from shardwise.engine.core.route import Route

if TYPE_CHECKING:
    from shardwise.comm.streams import Streams
    from shardwise.engine.core.context import Context

# What is asked of all buckets is asked by one `map`, which stays in C.
_is_complete = attrgetter("is_complete")
_has_frozen = attrgetter("arrivals.has_frozen")


class UnitGradients:
    """The part of a `Unit` that deals with gradients; the unit sets what is declared here."""

    name: str
    grads: list[BucketGrads]
    wires: list[Wire]
    context: Context
    streams: Streams
    requires_sync: bool
    requires_all_reduce: bool
    divide_by: float | None
    route: Route

    @property
    def has_frozen(self) -> bool:
        return any(map(_has_frozen, self.grads))

    def watch_gradients(self) -> None:
        """Whoever uses the full parameters, their gradients are heard of."""
        for grads in self.grads:
            grads.tally.trainable = grads.arrivals.watch(grads)

    def agree_on_flags(self) -> None:
        """`requires_grad` as users have set it on either form since it was last looked at."""
        for grads in self.grads:
            grads.arrivals.watch_again(grads)

    def arrived(self, grads: BucketGrads, index: int) -> bool:
        """A full gradient is in its accumulator. True when it was the unit's last.

        `Arrivals.collect` does the same in short for many small gradients.
        """
        param = grads.state.params[index]
        full = param.full
        grad, full.grad = full.grad, None
        if grad is None or not param.sharded.requires_grad:
            return False  # an autograd.Function returned None for it; or frozen since the forward
        if torch.is_grad_enabled():
            grad = grad.detach()
        grad = param.spread.own_gradient(param.name, grad)
        grads.tally.told |= 1 << index
        grads.tally.num_told += 1
        self.route.take(self, grads, index, grad)
        return self.requires_sync and self.has_all_gradients

    @property
    def takes_plain_gradients(self) -> bool:
        """Gradients go into a reduction as they are."""
        return self.requires_sync and self.route.is_usual and not torch.is_grad_enabled()

    def collect(self) -> bool:
        """Take in gradients of small parameters that nobody was told of. True when the unit has all
        that it waits for, by one of them.
        """
        found = [grads.arrivals.collect(grads, self) for grads in self.grads]
        return any(found) and self.has_all_gradients

    @property
    def has_all_gradients(self) -> bool:
        """Those of all trainable parameters have arrived."""
        return all(map(_is_complete, self.grads))

    def collect_left_gradients(self) -> None:
        """Take in gradients that somebody else than autograd's accumulator put on full parameters:
        pipeline schedules that compute gradients of weights by themselves do.
        """
        for grads in self.grads:
            for i, param in enumerate(grads.state.params):
                grad, param.full.grad = param.full.grad, None
                if grad is not None:
                    grads.tally.told |= 1 << i
                    grads.tally.num_told += 1
                    self.route.accumulate(self, grads, i, grad)

    @property
    def has_unreduced(self) -> bool:
        """Gradients were put into a reduction that was not issued, or partial ones wait for a
        sync.
        """
        if any(g.buffer is not None or g.has_partial for g in self.grads):
            return True
        return self.route.holds_sums(self)

    def issue_reductions(self) -> list[Reduction]:
        """Reduce every trainable bucket."""
        return [self.issue_reduction(g) for g in self.grads if g.trainable_layout().indices]

    def issue_reduction(self, grads: BucketGrads, *, joins: Missing | None = None) -> Reduction:
        if not self.streams.is_async:
            return self.route.issue(self, grads, joins=joins)
        with self.streams.lane("reduce"):
            return self.route.issue(self, grads, joins=joins)

    def settle_partials(self) -> None:
        """Reduce partial gradients now, because somebody reads them (clipping, a step inside
        `no_sync`).
        """
        with torch.no_grad(), phase_on(self.wires, "settle", self.name):
            self.context.weigh()
            waiting = [g for g in self.grads if g.has_partial]
            for reduction in [
                g.issue(self.context.weight.scale(self, g.state), True) for g in waiting
            ]:
                reduction.finish(run_hooks=False)
            for grads in waiting:
                grads.tally.clear()
            self.context.weight.count = None


def settle_by(ref: Callable[[], UnitGradients | None]) -> None:
    """`settle_partials` of a unit that may be gone."""
    unit = ref()
    if unit is not None:
        unit.settle_partials()
