"""A context: the units under one root, and the forward passes through them.

The root is whoever is called first from outside; at its first call `engine.module` makes a context,
which takes in the units of all modules below it, names them, and checks what can be checked before
anything is trained. Nesting is dynamic: `depth` counts engine calls, the outermost one enters and
leaves the transports' phases.

`order` holds the units whose forward ran with gradients and whose backward is still to come, in
the order of their first call. Reductions are issued in the reverse order, whatever the order in
which gradients complete: ranks whose autograd graphs differ inside a unit then still issue the
same sequence of collectives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from shardwise._torch_compat import graph_task
from shardwise.comm.phases import Entered, Wire, abandon_phases, enter_all, leave_all
from shardwise.comm.streams import Streams
from shardwise.comm.transport import WITHOUT_GRADIENTS
from shardwise.engine.core.backward import BackwardPass, end_now
from shardwise.engine.core.copy import WISH
from shardwise.engine.core.guests import end_of_call
from shardwise.engine.core.moments import Moments
from shardwise.engine.core.stages import bring_up_to_date
from shardwise.engine.core.unit import Unit
from shardwise.engine.core.upkeep import refresh
from shardwise.engine.core.weight import Weight
from shardwise.errors import EngineError

_wires = attrgetter("wires")
_serves_alone = attrgetter("serves_alone")


_LIVE: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()


def contexts() -> list[Context]:
    """All that are alive, oldest first."""
    return list(_LIVE.values())


class Context:
    """See the module docstring. Units are held weakly: they belong to their modules, and a model
    that is deleted frees its memory at once, unless a loss is alive whose graph goes through it.
    """

    def __init__(self) -> None:
        _LIVE[id(self)] = self
        self._units: list[weakref.ref[Unit]] = []
        self.depth = 0
        self.num_calls = 0  # of units
        self.latest_call: Call | None = None  # with gradients on, and a tensor as output
        self.order: dict[weakref.ref[Unit], None] = {}
        self.moments = Moments()
        self.backward: BackwardPass | None = None
        self.entered: list[Entered] = []  # innermost last: a backward may run inside a forward
        self.has_run = False
        self.is_alone = False  # a forward that copies serve which are kept, outside of any phase
        self.keeps_some = False  # copies stay between forwards, by a strategy or by wish
        self.may_hold = False  # copies that users asked to keep may be there, on any rank
        self.weight = Weight()
        self.lanes: set[Streams] = set()  # of units whose work runs beside the host's
        self._reached: set[weakref.ref[Unit]] = set()  # without sync, see `reduce_partials`

    # -- units -----------------------------------------------------------------------------------
    @property
    def units(self) -> list[Unit]:
        return [u for ref in self._units if (u := ref()) is not None]

    def take_in(self, units: Iterable[Unit]) -> None:
        for unit in units:
            before: Context | None = getattr(unit, "context", None)
            if before is not None:
                self.may_hold |= before.may_hold
                self.moments.take_over(before.moments)
            self.keeps_some |= unit.keeps_between_steps or unit.may_stay_without_grad
            unit.context, unit.gradients.weight = self, self.weight
            self.lanes |= {unit.streams} if unit.streams.is_async else set()
            if all(ref() is not unit for ref in self._units):
                self._units.append(weakref.ref(unit))

    def wires(self) -> list[Wire]:
        """The wires of all units, each once, in an order that is the same on all ranks."""
        return list(dict.fromkeys(chain.from_iterable(map(_wires, self.units))))

    # -- forward ---------------------------------------------------------------------------------
    @property
    def is_outermost(self) -> bool:
        return self.depth <= 1

    def begin_call(self, name: str) -> bool:
        """Control enters. True for an outermost call outside of any backward."""
        self.depth += 1
        if self.depth > 1:
            return False
        if graph_task() is not None:
            self.running_backward()  # a recomputation may be the first sign of one
            return False
        try:
            self._begin_forward(name)
        except BaseException:
            self.abandon()
            raise
        return True

    def _begin_forward(self, name: str) -> None:
        if self.backward is not None:
            self.abandon()  # its end was never reached: an exception ended it
            self.depth = 1
        for wire in self.wires():
            wire.end_stale_backward()
        for unit in self.units:
            if unit.mark.complete is not None:
                unit.complete_for_peers()
            if unit.mark.moved or not unit.is_registered():
                refresh(unit)  # before the phase, whose fence tells the peers of new buffers
        for streams in self.lanes:  # gathers of this step come behind writes to shards before it
            streams.mark()
        has_grad = torch.is_grad_enabled()
        self.is_alone = not has_grad and all(map(_serves_alone, self.units))
        if self.is_alone:
            self.entered.append({})
        else:
            self._enter("forward" if has_grad else WITHOUT_GRADIENTS, name)
            # Before its first pass nobody holds a copy.
            first = not (self.has_run or self.may_hold)
            self.agree_on_stale_copies([u for u in self.units if not first or u.middles])
            self.may_hold |= not has_grad
        self.has_run = True
        for tell in self.moments.before_forward:
            tell(self)

    def end_call(self, name: str, outermost: bool) -> None:
        self.depth -= 1
        if outermost:
            try:
                self._end_forward()
            except BaseException:
                self.abandon()
                raise
            self._leave("forward", name)

    def _end_forward(self) -> None:
        has_grad = torch.is_grad_enabled()
        for unit in self.units:
            if unit.is_running:
                unit.rest_after_forward()
            if unit.was_unsharded and has_grad:
                unit.was_unsharded = False
                unit.copy.is_stale = not unit.is_kept_by_setting  # else released where it ran
        for tell in self.moments.after_forward:
            tell(self)
        if self.keeps_some or not has_grad:
            self._fill_kept()
        self.forget_guests()  # not before: registering a form puts them back where they are
        self.latest_call, self.is_alone = None, False

    def _fill_kept(self) -> None:
        """Ranks may have run different units, or none may have run a certain one. Where copies stay
        after this forward, those of all units do, on all ranks: a later forward without gradients
        then asks nobody, on any rank.
        """
        if self.is_alone:
            return
        has_grad = torch.is_grad_enabled()
        missing = [
            unit
            for unit in self.units
            if unit.transports
            and unit.copy.needs_gather
            and (unit.keeps_between_steps or unit.may_stay_without_grad)
            and not (has_grad and unit.transport.is_ordered)  # else all ranks run the same
        ]
        for unit in missing:
            unit.unshard()
            unit.copy.holds |= WISH
        for unit in missing:
            unit.copy.wait()

    def fail_call(self, outermost: bool) -> None:
        """An exception passes through. The outermost call puts everything back to rest."""
        self.depth -= 1
        if outermost:
            self.abandon()

    def forget_guests(self) -> None:
        """They are for one call."""
        for unit in self.units:
            for bucket in unit.buckets:
                if bucket.guests:
                    end_of_call(bucket)

    def ran_forward(self, unit: Unit, *, is_awaited: bool) -> None:
        """A unit's forward begins. `is_awaited`: its backward is to be expected."""
        self.num_calls += 1
        for tell in self.moments.called:
            tell(unit)
        if is_awaited:
            unit.num_uses += 1
            self.order.setdefault(unit.ref)

    def agree_on_stale_copies(self, units: list[Unit]) -> None:
        """What lives between steps is gathered again when any rank wrote to its shards: full copies
        at their next use, shards that replicas share out (`home`) at once.
        """
        kept = [u for u in units if u.transports and (u.keeps_between_steps or u.middles)]
        if self.may_hold:
            kept = [u for u in units if u.transports and (u.middles or u.may_be_kept)]
        if not kept:
            return
        # Units that are not held count too: ranks differ in that after an exception.
        for unit in kept:
            unit.copy.is_stale = unit.is_behind
        # A unit on several meshes is gathered as one: what one mesh has agreed on goes on to the
        # next.
        for transport in dict.fromkeys(t for u in kept for t in u.transports):
            units = [u for u in kept if transport in u.transports]
            agreed = transport.agree([u.copy.is_stale for u in units])
            for unit, stale in zip(units, agreed, strict=True):
                unit.copy.is_stale = stale
        bring_up_to_date(u for u in kept if u.copy.is_stale and u.middles)

    # -- phases ----------------------------------------------------------------------------------
    def _enter(self, phase: str, name: str) -> None:
        self.entered.append(enter_all(self.wires(), phase, name))

    def _leave(self, phase: str, name: str) -> None:
        if not self.entered:
            return
        try:
            leave_all(self.entered.pop(), phase, name)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Back to rest after an exception: nothing gathered, nothing half reduced, phases left."""
        entered, self.entered = self.entered, []
        abandon_phases(*reversed(entered))
        if self.backward is not None:
            self.backward.abandon()
        for tell in self.moments.failed:
            tell(self)
        self.backward = None
        for unit in self.units:
            unit.abandon(keep=self.is_alone)
        self.forget_guests()
        self.order.clear()
        self.latest_call, self.is_alone = None, False
        self._reached.clear()
        self.depth = 0

    # -- backward --------------------------------------------------------------------------------
    def running_backward(self) -> BackwardPass:
        """The backward that runs now; begins one at its first sign."""
        backward = self.backward or self.begin_backward()
        backward.watch_end()
        return backward

    def begin_backward(self) -> BackwardPass:
        backward = self.backward = BackwardPass(self)
        backward.watch_end()
        self._enter("backward", "")
        for tell in self.moments.before_backward:
            tell(backward)
        for unit in self.units:
            if unit.gradients.accumulates or not unit.settings.requires_sync:
                unit.gradients.backward_begins()
        return backward

    def reduce_partials(self) -> None:
        """Reduce what backwards without sync have left, as the end of a backward would.

        Pipelines do this once per step, when all micro-batches are through.
        """
        if graph_task() is not None:
            raise EngineError("reduce_partials: a backward runs; call it between backwards")
        if self.backward is not None:
            self.abandon()  # an exception ended it
        self.backward = BackwardPass(self)
        self._enter("backward", "")
        try:
            for tell in self.moments.before_backward:
                tell(self.backward)
            for unit in self.units:
                unit.gradients.end_accumulation()
                unit.gradients.collect_left()
            self._check_reached()
            self.weigh()
            end_now(self.backward)
        except BaseException:
            if self.backward is not None:
                self.abandon()
            raise

    def weigh(self) -> None:
        """Gradients are reduced now, and no backward says what by."""
        for tell in self.moments.weighing:
            tell(self)

    def _check_reached(self) -> None:
        """Schedules that compute gradients of inputs and weights apart (zero bubble) look for the
        parameters in the graph of the first; where they find shards they lose gradients silently.
        """
        reached, self._reached = self._reached, set()
        units = [u for u in self.units if u.ref in reached]
        empty = [u.name for u in units if u.is_trainable and not u.gradients.are_unreduced]
        if empty:
            raise EngineError(
                f"{', '.join(empty)}: backwards went through, but no parameter has a gradient. A "
                "schedule that computes gradients of inputs and of weights apart (zero bubble) "
                "needs the full parameters in between: pass reshard_after_forward=False to "
                "fully_shard"
            )

    def end_backward(self) -> None:
        self.backward = self.latest_call = None  # a call may have run again, for its activations
        for tell in self.moments.after_backward:
            tell(self)
        if self.may_hold:
            self.may_hold = False
            for unit in self.units:
                unit.was_unsharded = False
        self._leave("backward", "")

    def pre_backward(self, unit: Unit) -> None:
        """The gradient of an output of `unit` is complete."""
        if not unit.settings.requires_sync:
            self._reached.add(unit.ref)
        self.running_backward().pre_backward(unit)


_OUTPUT = "shardwise.output"


def watch_output(tensor: torch.Tensor, call: Call) -> None:
    """Call `call` when the gradient of an output of its unit is complete."""
    seen = behind_views(tensor)
    seen.register_hook(call)
    if seen.grad_fn is not None:
        is_innermost = call.unit.context.num_calls == call.number
        # That of an inner unit, where the outer one returns it as it is, stays.
        seen.grad_fn.metadata.setdefault(_OUTPUT, (call.unit.ref, is_innermost))  # type: ignore[attr-defined]


def output_at(node: Any) -> tuple[weakref.ref[Unit] | None, bool]:
    """The unit whose output a node of a graph computes, and whether no other one ran inside."""
    return node.metadata.get(_OUTPUT, (None, False))


def behind_views(tensor: torch.Tensor) -> torch.Tensor:
    """Where a hook belongs: what is written to a view gives it a history anew, without the hooks
    that it had; and one on a view of which a part was written crashes torch. Many outputs are
    views, those of a linear layer too.
    """
    base = tensor._base
    return tensor if base is None or base.is_leaf else base


class Call:
    """One call of a unit with gradients on, and the hook on its outputs. While it is open its
    backward is to come or under way; it lives as long as the hooks in its graph.
    """

    __slots__ = ("__weakref__", "_leaf_hook", "followers", "number", "output", "unit")

    def __init__(self, unit: Unit, *, is_open: bool) -> None:
        self.unit = unit
        self.number = unit.context.num_calls
        self.output: weakref.ref[torch.Tensor] | None = None  # where it is a tensor
        self.followers: list[Call] = []  # whose only input that is
        self._leaf_hook: RemovableHandle | None = None
        if is_open:
            unit.open_calls.add(id(self))

    def __del__(self) -> None:
        self.unit.open_calls.discard(id(self))
        if self._leaf_hook is not None:
            self._leaf_hook.remove()

    def __call__(self, grad: torch.Tensor) -> None:
        for follower in self.followers:
            follower.input_done(grad)
        unit = self.unit
        unit.open_calls.add(id(self))  # again, in another backward through the same graph
        unit.context.pre_backward(unit)

    def watch_input(self, only: torch.Tensor) -> None:
        """Be told when its gradient is complete. A leaf outlives the graph: it holds no call."""
        if not only.is_leaf:
            behind_views(only).register_hook(self.input_done)
            return
        ref = weakref.ref(self)

        def input_done(grad: torch.Tensor) -> None:
            call = ref()
            if call is not None:
                call.input_done(grad)

        self._leaf_hook = only.register_hook(input_done)

    def input_done(self, _grad: torch.Tensor) -> None:
        """The gradient of its only input is complete."""
        unit = self.unit
        unit.open_calls.discard(id(self))
        unit.context.running_backward().input_done(unit)
