"""One backward: from the first hook that fires to autograd's final callback.

Signs of it, in any order: the gradient of a unit's output is there (`pre_backward`), a full
gradient is in its accumulator (`gradient_arrived`), a forward runs again (activation
checkpointing). Reduction of a unit is issued when its last gradient has arrived and all units
behind it in the forward order have issued theirs; what is incomplete then (parameters that the
loss did not reach) is flushed at the end. A unit is released when the gradient of its only input is
there, or else by the next `pre_backward`: the gradient of the next unit's output is complete only
when everything inside this unit has run. Where some parameters are frozen, a complete unit may have
more to run, and the end of the backward releases it.

One loss can reach several models (policy and reward, generator and discriminator), each with a
context of its own; their units may share a mesh, and with it the phases of its transport. So their
ends are one: all passes issue what is incomplete, then the reductions that only peers have are
joined, then everything is waited for, delivered and released, and only then control goes back.
"""

from __future__ import annotations

import weakref
from collections import deque
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from shardwise._torch_compat import (
    at_end_of_backward,
    graph_task,
    graph_task_id,
    outside_transforms,
)
from shardwise.comm.transport import Missing, Position
from shardwise.engine.core.copy import GRAPH
from shardwise.engine.core.gradients import BucketGrads, carried_in
from shardwise.engine.core.reduction import Reduction
from shardwise.engine.core.unit import Unit
from shardwise.errors import DivergenceError

if TYPE_CHECKING:
    from shardwise.engine.core.context import Context

_buffer = attrgetter("buffer")  # asked of all buckets by one `map`, which stays in C


class BackwardPass:
    """See the module docstring."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._watched: set[int] = set()
        self.first_task = graph_task()
        self.moments = context.moments
        self.creates_graph = False
        self._quiet: dict[Unit, None] = {}  # whose small gradients are looked for, see `arrivals`
        self._recent: Unit | None = None  # the latest of them
        self.touched: dict[Unit, None] = {}
        self._complete: set[Unit] = set()
        self._issued: set[Unit] = set()
        self._done_with: list[Unit] = []
        self._in_flight: deque[Reduction] = deque()

    def watch_end(self) -> None:
        """Ask for the final callback, once for each graph task (reentrant checkpointing nests
        them).
        """
        task = graph_task_id()
        if task not in self._watched and task != -1:
            self._watched.add(task)
            end_with(task, self)

    # -- moments ---------------------------------------------------------------------------------
    def pre_backward(self, unit: Unit) -> None:
        """The gradient of an output of `unit` is complete."""
        if torch.is_grad_enabled():
            # create_graph: the graph under construction saves the full parameters.
            self.creates_graph = True
            unit.copy.holds |= GRAPH
        self._collect_previous(unit)
        if unit not in self.touched:
            self.touched[unit] = None
            for tell in self.moments.reached:
                tell(unit)
        self._release_done(unit)
        if not self.creates_graph:
            self._be_quiet(unit)
        unit.pre_backward()
        for tell in self.moments.computing_backward:
            tell(unit)

    def recomputing(self, unit: Unit) -> None:
        """A checkpointed forward runs again; units whose backward is over make room for it."""
        self._collect_previous(unit)
        self._release_done(unit)

    def input_done(self, unit: Unit) -> None:
        """The gradient of a call's input is complete, so nothing inside that call is left to run.
        Another call may be: of another module of a list, or of the same one in a chain.
        """
        self._collect(unit)
        if unit.copy.holds & GRAPH or unit.open_calls:
            return
        if unit.borrowers and any(u in self.touched for u in unit.open_borrowers):
            return  # one that is under way around this unit, or beside it, still needs it
        unit.rest_after_backward()

    def gradient_arrived(self, unit: Unit, grads: BucketGrads, indices: tuple[int]) -> None:
        """A full gradient is in its accumulator."""
        self.watch_end()
        self.touched.setdefault(unit)
        if unit.gradients.arrived(grads, indices):
            self.complete(unit)

    def complete(self, unit: Unit) -> None:
        """All gradients of a unit have arrived."""
        self._be_heard(unit)
        self._complete.add(unit)
        if not unit.gradients.has_frozen and not unit.copy.holds & GRAPH:
            self._done_with.append(unit)
        self._issue_ready()

    def _release_done(self, but: Unit) -> None:
        if self._done_with:
            done, self._done_with = self._done_with, []
            for unit in done:
                if unit is not but:
                    unit.rest_after_backward()

    def _be_quiet(self, unit: Unit) -> None:
        """From its first output gradient on; until the unit is complete, or the backward over."""
        self._recent = unit
        if unit not in self._quiet:
            self._quiet[unit] = None
            for grads in unit.gradients.buckets:
                grads.arrivals.be_quiet()

    def _be_heard(self, unit: Unit) -> None:
        if unit in self._quiet:
            del self._quiet[unit]
            for grads in unit.gradients.buckets:
                grads.arrivals.be_heard()

    def _collect_previous(self, unit: Unit) -> None:
        """What is computed from here on is this unit's: look at the one before."""
        recent = self._recent
        if recent is not None and recent is not unit:
            self._collect(recent)

    def _collect(self, unit: Unit) -> None:
        if unit in self._quiet and unit.gradients.collect():
            self.complete(unit)

    # -- reducing --------------------------------------------------------------------------------
    def _issue_ready(self) -> None:
        """Issue complete units from the back of the forward order; stop at the first that still
        collects.

        Units that this backward has not reached are passed over: theirs is another one, or none.
        """
        order = self.context.order
        for ref in reversed(list(order)):
            unit = ref()
            if unit in self._complete:
                del order[ref]
                self._issue(unit)
                if not self._complete:
                    return
            elif unit in self.touched:
                break
        for unit in list(self._complete):
            if unit.ref not in order:  # a second arrival, or a graph from before an exception
                self._issue(unit)

    def _issue(self, unit: Unit) -> None:
        self._complete.discard(unit)
        self._issued.add(unit)
        overlaps = unit.overlaps
        if self._in_flight:
            self._finish_all_but(unit.settings.max_reductions - 1 if overlaps else 0)
        reductions = unit.gradients.issue()
        self._in_flight.extend(reductions)
        for tell in self.moments.issued:
            tell(unit, reductions)
        if not overlaps:
            self._finish_all_but(0)
        if unit.gradients.delivers_early:
            self._finish_done()

    def _finish_all_but(self, num: int) -> None:
        """Bound what is in flight. A transport without an order may have to wait for a peer that
        waits for this rank's other reductions, so there nothing is waited for before the end.
        """
        while len(self._in_flight) > num and self._in_flight[0].grads.state.transport.is_ordered:
            self._finish_oldest()

    def _finish_done(self) -> None:
        """Deliver what all ranks have handed in, so that it need not be kept until the end."""
        while self._in_flight and self._in_flight[0].is_done:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        reduction = self._in_flight.popleft()
        unit = reduction.grads.state.unit()
        if unit.streams.is_async:
            reduction.finish_on_lane()
        elif torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                reduction.finish()
        else:
            reduction.finish()
        for tell in self.moments.delivered:
            tell(unit)

    # -- the end ---------------------------------------------------------------------------------
    def advance_reductions(self) -> None:
        """Where reductions have no order, a peer may wait for any of them: issue the stages that
        follow before the result of one is waited for.
        """
        for reduction in self._in_flight:
            if not reduction.grads.state.transport.is_ordered:
                reduction.advance()

    def finish_reductions(self) -> None:
        """Wait for all and deliver. Control is the user's next, who reads what is on the host."""
        while self._in_flight:
            self._finish_oldest()
        for streams in self.context.lanes:
            streams.land()

    def rest(self) -> None:
        """Release what is gathered."""
        self._done_with.clear()
        for unit in list(self._quiet):
            self._be_heard(unit)
        for unit in self.context.units:
            unit.num_uses = 0
            if not self.creates_graph:
                unit.copy.holds &= ~GRAPH
            if unit.copy.is_there or unit in self.touched or not unit.copy.shows_shards:
                unit.rest_after_backward()

    def flush(self) -> None:
        """Issue what is incomplete: first in the reverse forward order, then units that are not in
        it.
        """
        context = self.context
        for unit in list(self._quiet):
            self._collect(unit)
        for unit in context.units:
            if not unit.settings.requires_sync:
                unit.gradients.collect_left()
        for ref in reversed(list(context.order)):
            unit = ref()
            if unit is not None and (unit in self.touched or unit.gradients.are_unreduced):
                del context.order[ref]
                self._issue_if_needed(unit)
        for unit in context.units:
            self._issue_if_needed(unit)

    def _issue_if_needed(self, unit: Unit) -> None:
        if not unit.settings.requires_sync:
            return
        if unit in self._issued:  # what it keeps for a later all-reduce is not collected anew
            needed = any(map(_buffer, unit.gradients.buckets))
        else:
            needed = unit in self.touched or unit.gradients.are_unreduced
        if needed:
            self._issue(unit)

    def join(self, grads: BucketGrads, missing: Missing) -> None:
        """Reduce a bucket that this rank has no gradients of, because peers do."""
        unit = grads.state.unit()
        self.touched.setdefault(unit, None)
        unit.gradients.watch()  # it may not have run since `requires_grad` was changed
        reduction = unit.gradients.route.issue(unit.gradients, grads, joins=missing)
        self._in_flight.append(reduction)
        for tell in self.moments.issued:
            tell(unit, [reduction])

    def abandon(self) -> None:
        """An exception ended the backward: drop what was to come. Collectives that were issued run
        to their end first, since they write into buffers that would be freed.
        """
        forget(self)
        for unit in list(self._quiet):
            self._be_heard(unit)
        while self._in_flight:
            reduction = self._in_flight.popleft()
            if reduction.grads.state.transport.is_ordered:
                reduction.wait()


# -- the end, once for all contexts that take part in it -------------------------------------------
class _Passes(list[BackwardPass]):
    """Those that end with one graph task, which holds them: an exception lets go of them all."""


_ENDS: weakref.WeakValueDictionary[int, _Passes] = weakref.WeakValueDictionary()  # by graph task


def end_with(task: int, backward: BackwardPass) -> None:
    """Let `backward` take part in the end of a graph task (reentrant checkpointing nests them)."""
    passes = _ENDS.get(task)
    if passes is None:
        passes = _ENDS[task] = _Passes()
        at_end_of_backward(partial(_end, task, passes))
    passes.append(backward)


def forget(backward: BackwardPass) -> None:
    """An exception ended the backward; where an outer one goes on, that is not to end it too."""
    for passes in list(_ENDS.values()):
        if backward in passes:
            passes.remove(backward)


def is_to_end(task: int | None) -> bool:
    """A graph task runs, as far as anybody knows: one that failed lets go of its passes."""
    return task in _ENDS


def _end(task: int, passes: _Passes) -> None:
    """Autograd has run all nodes of a graph task."""
    _ENDS.pop(task, None)  # who comes now, by a hook, gets an end of its own
    ending = [b for b in passes if b.first_task == task]
    outside_transforms(partial(_finish, passes, ending))


def end_now(backward: BackwardPass) -> None:
    """End a pass that no autograd graph belongs to."""
    _finish([backward], [backward])


def _finish(passes: list[BackwardPass], ending: list[BackwardPass]) -> None:
    try:
        for backward in passes:
            backward.flush()
        if ending:
            _join_peers(ending)
        for backward in passes:
            backward.advance_reductions()
        for backward in passes:
            backward.finish_reductions()
            for tell in backward.moments.ending:
                tell(backward)
        for backward in ending:
            backward.rest()
        for backward in ending:
            backward.context.end_backward()
    except BaseException:
        for backward in passes:  # now, and not at the next forward: peers wait for this rank
            if backward.context.backward is backward:
                backward.context.abandon()
        raise
    for backward in ending:  # control is the user's again, so a complaint holds up no peer
        for tell in backward.moments.ended:
            tell(backward)


def _join_peers(ending: list[BackwardPass]) -> None:
    """Take part, with nothing to add, in reductions that only other ranks have (a branch, an expert
    that ran there): this rank owns a shard of their sums too.
    """
    wires = [wire for backward in ending for wire in backward.context.entered[-1]]
    for wire in dict.fromkeys(wires):
        if wire.depth > wires.count(wire):
            continue  # an outer backward goes on, on the same transport
        position = Position(wire.step, "backward", "")
        while missing := wire.transport.missing(position):
            for one in missing:
                grads = carried_in(one.bucket)
                if grads is None:
                    raise DivergenceError(
                        f"{one.bucket.name}: another rank reduces gradients of this unit, which "
                        "this rank has deleted; keep the same models on all ranks"
                    )
                context = grads.state.unit().context
                own = next((b for b in ending if b.context is context), ending[0])
                own.join(grads, one)
