"""A unit: the parameters of one `fully_shard` call, and what happens to them in a step.

    moment          full copy                                    registered   gradients
    at rest         none (or kept, `Lifetime.CLEAN`)             shards       None or sharded
    pre_forward     gathered, unless it is held and fresh        full
    post_forward    released, unless the strategy keeps it       shards, or full when kept for the
                                                                 backward
    pre_backward    gathered if it was released                  full         arrive one by one
    complete                                                                  reduction issued
    end             released                                     shards       delivered

Who calls what when is decided in `call` and `context` (forward) and in `backward`; here is only
what one unit does.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from shardwise._torch_compat import (
    functorch_transform,
    graph_task,
    outside_transforms,
)
from shardwise.comm.choose import ANYWHERE
from shardwise.comm.phases import Wire, phase_on
from shardwise.comm.streams import Streams
from shardwise.comm.transport import Handle, Transport
from shardwise.engine.core.build import Found, Plan, Tie, build_buckets
from shardwise.engine.core.copy import (
    BACKWARD,
    CLEAN,
    GRAPH,
    PASS,
    PASSING,
    USE,
    USER,
    WISH,
    FullCopy,
)
from shardwise.engine.core.gradients import BucketGrads, Gradients
from shardwise.engine.core.parameter import ShardedParam
from shardwise.engine.core.settings import Settings
from shardwise.engine.core.stages import Stage
from shardwise.engine.core.upkeep import admit_guests, forget_dead_slots, rebuild, refresh
from shardwise.engine.tensor.shard_tensor import Mark
from shardwise.errors import EngineError
from shardwise.layout import Lifetime

if TYPE_CHECKING:
    from shardwise.engine.core.context import Context


# What is asked of all buckets is asked by one `map`, which stays in C.
_gather = methodcaller("gather")
_written = methodcaller("written_names")
_is_registered = methodcaller("is_registered")


class Unit:
    """See the module docstring."""

    def __init__(
        self,
        name: str,
        found: list[Found],
        plan: Plan,
        streams: Streams,
        num_modules: int,
        ignored: frozenset[int],
    ) -> None:
        self.name = name
        self.ref: weakref.ref[Unit] = weakref.ref(self)
        self.plan = plan
        self.mesh = plan.mesh
        self.transport = plan.transport
        self.streams = streams
        self.policy = plan.policy
        self.strategy = strategy = plan.strategy
        self.mark = Mark(name)
        self.copy = FullCopy(self.mark, streams)
        self.num_modules = num_modules
        self.modules: list[weakref.ref[nn.Module]] = []  # that `fully_shard` was called with
        self.ignored = ignored
        self.custom_comms: dict[str, Any] = {}  # the user's "all_gather", "reduce_scatter"
        self.settings = Settings(
            reshard_after_forward=strategy.lifetime is Lifetime.USE,
            reshard_after_backward=strategy.lifetime is not Lifetime.CLEAN,
        )
        self.gradients = Gradients(self.settings)
        self.build(found)
        self.context: Context  # set when a context takes the unit in

        self.keeps_between_steps = strategy.lifetime is Lifetime.CLEAN
        self.copy.holds = CLEAN if self.keeps_between_steps else 0
        self.is_root = False
        self.forward_prefetch: list[weakref.ref[Unit]] = []
        self.backward_prefetch: list[weakref.ref[Unit]] = []
        self.set_prefetch(None)

        self.num_uses = 0  # forwards with gradients since the last backward
        self.was_unsharded = False  # by the user, on all ranks, since the last pass with gradients
        self._modules_run = 0
        self.is_awaited = False  # the forward that runs has given an output that needs a gradient
        self.open_calls: set[int] = set()  # ids of calls whose backward is not over
        self.is_adopted = False  # a root has taken it in and named it
        self._tied_to: list[Unit] = []  # units whose parameters are used in this one too
        self.borrowers: list[weakref.ref[Unit]] = []  # where parameters of this one are used
        self._num_users = 0  # tied units that run now and need this one gathered

    def build(self, found: list[Found]) -> None:
        self.buckets = build_buckets(self.name, found, self.plan, self.mark)
        ref = self.ref
        for bucket in self.buckets:
            bucket.unit = ref
            for param in bucket.params:
                param.unit = ref
        self.gradients.buckets = [BucketGrads(b, lambda: settle_by(ref)) for b in self.buckets]
        self.copy.buckets, self.copy.shows_shards = self.buckets, True
        self.tell_transport()
        self._make_parts()
        self._find_wires()

    def _make_parts(self) -> None:
        if self.strategy.forward_world:
            for bucket in self.buckets:
                if bucket.bucket is not None and bucket.part is None:
                    bucket.make_part(self.strategy.forward_world, self.plan.open)

    def tell_transport(self) -> None:
        """Tell by whose collectives buckets are moved, and remember whose gradients they carry."""
        for grads in self.gradients.buckets:
            bucket = grads.state.bucket
            if bucket is not None:
                grads.carry_in(bucket)
                for kind, comm in self.custom_comms.items():
                    bucket.use_collective(kind, comm)
                bucket.separate_reductions(self.settings.separates_reductions)
                bucket.allocate_by_group(self.settings.allocates_by_group)
                if self.settings.symmetric_backend:
                    bucket.gather_symmetrically(self.settings.symmetric_backend)

    def _find_wires(self) -> None:
        """The wires that this unit's collectives go over, the transports of its gathers, and the
        shards that replicas share out.
        """
        self.middles: list[Stage] = [b.stages[-1] for b in self.buckets if b.home is not None]
        self.transports: list[Transport] = list(
            dict.fromkeys(
                b.transport for b in self.buckets if b.layout.world > 1 or b.home is not None
            )
        )
        stages = [stage for b in self.buckets for stage in reversed(b.stages)]
        stages += [b.part for b in self.buckets if b.part is not None and b.part.serves]
        wires = [Wire.of(stage.transport) for stage in stages] or [Wire.of(self.transport)]
        self.wires: list[Wire] = list(dict.fromkeys(wires))

    @property
    def params(self) -> list[ShardedParam]:
        return [p for b in self.buckets for p in b.params]

    def set_prefetch(self, enabled: bool | None, gather_limit: int | None = None) -> None:
        """`enabled`: None for where it pays; `gather_limit`: bytes that prefetching may reach.

        `overlaps` says whether collectives run beside computing: then gathers are issued early, and
        more than one reduction may be in flight.
        """
        self.prefetch, self.gather_limit = enabled, gather_limit
        wanted = self.streams.is_async if enabled is None else enabled
        self.overlaps = wanted and self.transport.is_ordered

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered copy."""
        return sum(b.layout.full_bytes for b in self.buckets if not b.aliases)

    @property
    def is_tied(self) -> bool:
        """Parameters of it are used in other units' modules, or those of others here."""
        return bool(self._tied_to or self.borrowers)

    @property
    def open_borrowers(self) -> list[Unit]:
        """Units that use its parameters too, and whose backward is not over."""
        return [u for ref in self.borrowers if (u := ref()) is not None and u.open_calls]

    @property
    def is_trainable(self) -> bool:
        return any(p.sharded.requires_grad for p in self.params)

    @property
    def is_kept_by_setting(self) -> bool:
        return not (self.settings.reshard_after_forward or self.settings.root_rule)

    @property
    def may_stay_without_grad(self) -> bool:
        """Forwards without gradients leave its copy there, by wish, setting or strategy."""
        return bool(self.copy.holds & USER) or self.is_kept_by_setting

    @property
    def may_be_kept(self) -> bool:
        """On some rank; says the same on all."""
        return self.keeps_between_steps or self.was_unsharded or self.is_kept_by_setting

    @property
    def serves_alone(self) -> bool:
        """A forward without gradients needs nothing of other ranks, as far as this one knows."""
        is_there = self.may_be_kept and not self.is_behind
        return not self.transports or (is_there and not self.copy.is_stale)

    @property
    def is_behind(self) -> bool:
        """What it keeps between forwards is older than this rank's shards, or is not there."""
        if self.may_be_kept and not (self.copy.is_there and self.copy.is_current):
            return True
        return any(middle.version != self.mark.count for middle in self.middles)

    def is_registered(self) -> bool:
        """True when the modules hold this unit's parameters, in whatever form."""
        return all(map(_is_registered, self.buckets))

    def take_settings(self, settings: Settings) -> None:
        """Those of the unit that this one is a copy of."""
        self.settings = self.gradients.settings = replace(settings)
        self.tell_transport()

    def use_custom_comm(self, kind: str, comm: Any) -> None:
        """Gathers or reductions of this unit go through the user's collective."""
        if not self.transport.takes_custom_collectives:
            self.plan = self.plan.on_transport(ANYWHERE)
            self.transport = self.plan.transport
            self.set_prefetch(self.prefetch, self.gather_limit)
            self.reshard()
            rebuild(self)
        self.custom_comms[kind] = comm
        self.tell_transport()

    def tie(self, ties: list[Tie]) -> None:
        """Register, in slots of this unit's modules, parameters that belong to other units.

        While this unit runs, those are gathered too. Such a parameter has one full form, so its
        gradient holds the contributions of all places.
        """
        for home, slot in ties:
            home.slots.append(slot)
            slot[0][slot[1]] = home.sharded
            owner = home.unit()
            for bucket in owner.buckets if owner is not None else ():
                bucket.forget_places()
            if owner is not None and owner is not self:
                self.borrow_from(owner)

    def borrow_from(self, owner: Unit) -> None:
        """Parameters of `owner` are registered in this unit's modules too."""
        if owner not in self._tied_to:
            self._tied_to.append(owner)
            owner.borrowers.append(self.ref)

    def materialize(self) -> None:
        """Allocate shards for parameters on the meta device. What is in them is undefined until
        somebody fills them.
        """
        for bucket in self.buckets:
            if bucket.bucket is None:
                bucket.allocate()
                for i, param in enumerate(bucket.params):
                    param.make_sharded(bucket.fresh_shard(i), param.sharded)
                bucket.forget_forms()
                bucket.register_sharded()
                bucket.make_full()
        self.tell_transport()
        self._make_parts()
        self._find_wires()

    # -- full copies -----------------------------------------------------------------------------
    def unshard(self) -> None:
        """Issue the gather, unless a fresh copy is held. `copy.wait` must follow before use.

        A backward uses the copy that its forward used, also when the shards were written in
        between.
        """
        if self.copy.needs_gather:
            self._issue_gather()

    def _issue_gather(self) -> None:
        if self.transports and self.context.is_alone:
            raise EngineError(
                f"the unit {self.name!r} must be gathered in the middle of a forward without "
                "gradients that began with all copies current: its parameters were written, or "
                "resharded, inside that forward. Write before the forward, on all ranks"
            )
        for tell in self.context.moments.gathering:
            tell(self)
        if self.mark.complete is not None:
            self.mark.complete()
        self.copy.issue(self._gather)

    def complete_for_peers(self) -> None:
        """Before a phase: where peers read shards without being asked, these are whole by then."""
        if self.mark.moved or any(t.reads_at_any_time for t in self.transports):
            assert self.mark.complete is not None
            self.mark.complete()

    def fill_middles(self) -> None:
        """Gather the shards from the replicas that share them out."""
        for tell in self.context.moments.filling:
            tell(self)
        if self.mark.complete is not None:
            self.mark.complete()
        with torch.no_grad(), self.streams.lane("gather"):
            outside_transforms(self._fill_middles)

    def _fill_middles(self) -> None:
        for bucket in self.buckets:
            bucket.fill_middle(self.mark.count)

    def _gather(self) -> list[Handle]:
        return list(map(_gather, self.buckets))

    def _make_usable(self) -> None:
        """Gathered, complete, and registered."""
        copy = self.copy
        if copy.needs_gather:
            self._issue_gather()
        if copy.handles or copy.event is not None:
            copy.wait()
        copy.show_full()

    def reshard(self, after: str = "") -> None:
        """Register the shards and release the full copy, whoever holds it."""
        copy = self.copy
        copy.show_shards()
        copy.holds &= ~PASSING
        if copy.is_there:
            copy.release(after)
            for tell in self.context.moments.released:
                tell(self)

    def reshard_for_state_dict(self) -> None:
        """State dicts show shards, whatever is gathered.

        With `assign=True` the modules of a list are loaded one after the other: what the first was
        given is left alone when the next one's turn comes.
        """
        forget_dead_slots(self)
        self.gradients.agree_on_flags()
        if self.wires[0].depth == 0 and self.is_registered():
            kept = self.may_stay_without_grad and self.copy.is_there and self.copy.is_current
            if self.keeps_between_steps or kept:
                self.copy.show_shards()
            else:
                self.reshard()

    def start_user_unshard(self) -> None:
        if self.mark.complete is not None:
            self.mark.complete()
        if self.mark.moved or not self.is_registered():
            refresh(self)
        if self.context.is_alone and self.serves_alone:
            return
        self.copy.holds |= USER
        self.was_unsharded = True
        self.context.may_hold = self.context.keeps_some = True
        self.streams.mark()
        with phase_on(self.wires, "unshard", self.name):
            if self.middles and graph_task() is None:  # a backward uses the values of its forward
                self.context.agree_on_stale_copies([self])
            self.unshard()

    def finish_user_unshard(self) -> None:
        self.copy.wait()
        self.gradients.watch()
        self.copy.show_full()

    def settle_partials(self) -> None:
        """Reduce partial gradients now, because somebody reads them (clipping, a step inside
        `no_sync`).
        """
        with torch.no_grad(), phase_on(self.wires, "settle", self.name):
            self.context.weigh()
            self.gradients.end_accumulation()
            self.gradients.settle()

    # -- moments ---------------------------------------------------------------------------------
    def pre_forward(self) -> None:
        if self.context.depth > 1:  # the outermost call has looked at all units before
            for unit in (self, *self._tied_to):
                if not all(map(_is_registered, unit.buckets)):
                    admit_guests(unit)
        self._make_usable()
        self.gradients.watch()
        self._modules_run += 1
        for owner in self._tied_to:
            owner._num_users += 1
            owner._make_usable()
            owner.gradients.watch()

    def post_forward(self, in_backward: bool) -> None:
        """Release or keep; `in_backward` is a recomputation, whose backward follows at once."""
        for owner in self._tied_to:
            owner._num_users -= 1
            owner.is_awaited |= self.is_awaited
            if not in_backward and owner._modules_run == 0:
                owner.rest_after_forward()
        if in_backward:
            self._modules_run = 0
            self.copy.holds |= BACKWARD
            return
        if self._modules_run < self.num_modules and not self.context.is_outermost:
            return  # the other modules of a list are still to come
        self.rest_after_forward()

    def rest_after_forward(self) -> None:
        """The state between forward and backward."""
        self._modules_run = 0
        self._check_unwritten()
        if functorch_transform() is not None:
            self.is_awaited = False
            return  # tangents, which no hook of ours can follow, may still need the full copy
        if self._num_users:
            return
        # Where no output needs a gradient no backward comes, whatever the mode: a frozen teacher.
        copy, has_grad = self.copy, torch.is_grad_enabled() and self.is_awaited
        self.is_awaited = False
        copy.holds &= ~PASS
        if not has_grad:
            copy.holds |= WISH if self.may_stay_without_grad else 0
        else:
            if copy.holds & USER and not any(bucket.guests for bucket in self.buckets):
                copy.holds &= ~USER  # else `functional_call` puts back the full parameters it found
            if not (self.keeps_between_steps or self.releases_after_forward()):
                copy.holds |= PASS
        if not copy.holds:
            for tell in self.context.moments.releasing:
                tell(self)
            if copy.is_there and self.strategy.forward_world and has_grad:
                self._regroup()
                return
        self.settle("" if has_grad else "forward")

    def settle(self, after: str = "") -> None:
        """What follows from the holds: without one of use, modules show shards; without any, memory
        goes.
        """
        if not self.copy.holds:
            self.reshard(after)
        elif not self.copy.holds & USE:
            self.copy.show_shards()

    @property
    def is_running(self) -> bool:
        """Some of its modules have begun a forward that has not been rested from."""
        return self._modules_run > 0

    def addresses(self) -> set[int]:
        """Where gathered memory begins that is to be released."""
        return {address for b in self.buckets for address in b.addresses()}

    def _regroup(self) -> None:
        """Keep shards over a smaller world until the backward."""
        for bucket in self.buckets:
            bucket.keep_part()
        self.reshard()
        self.copy.show_between()

    def _drop_parts(self) -> None:
        if self.strategy.forward_world:
            for bucket in self.buckets:
                bucket.drop_part()

    def _check_unwritten(self) -> None:
        """What somebody wrote into a gathered copy is lost with it: say so while it is there."""
        if not self.copy.is_there:
            return
        if any(map(_written, self.buckets)):
            names = [name for b in self.buckets for name in b.written_names()]
            raise EngineError(
                f"{', '.join(names)}: written in place while the unit {self.name!r} was gathered "
                "(in its forward, or between forward and backward); the sharded parameter would "
                "not see it. Write to the parameters at rest instead: before the forward, or after "
                "the backward"
            )

    def releases_after_forward(self) -> bool:
        if self.settings.root_rule:
            return not self.is_root
        return self.settings.reshard_after_forward

    def pre_backward(self) -> None:
        if self.settings.unshard_in_backward or self.copy.is_there:
            self.copy.holds |= BACKWARD
            self._make_usable()
            for bucket in self.buckets:
                bucket.count_uses_before()
            for owner in self._tied_to:
                owner.pre_backward()

    def rest_after_backward(self) -> None:
        """The state after a backward."""
        copy = self.copy
        if copy.holds & GRAPH:
            return
        copy.holds &= ~PASSING
        if copy.shows_shards and not copy.is_there:
            return  # it is at rest already
        self._check_unwritten()
        self._drop_parts()
        if not (self.settings.reshard_after_backward or self.keeps_between_steps):
            copy.holds |= PASS
        self.settle("backward")

    def abandon(self, *, keep: bool = False) -> None:
        """An exception ended a pass: back to rest, without what it collected. `keep`: copies that
        other ranks keep too, who know nothing of it.
        """
        self.gradients.discard()
        for param in self.params:
            param.full.grad = None
        self._modules_run = self._num_users = self.num_uses = 0
        self.is_awaited = False
        self.open_calls.clear()
        self.copy.is_stale |= not keep  # until ranks have asked each other: some may have none
        self.was_unsharded &= keep
        self.show_shards(keep=keep)

    def show_shards(self, *, keep: bool = False) -> None:
        """Behind an exception, whatever was to follow."""
        self._drop_parts()
        is_kept = self.keeps_between_steps or (keep and self.may_stay_without_grad)
        self.copy.holds &= ~PASSING | (USER | WISH if is_kept else 0)
        if is_kept:
            self.copy.show_shards()
        else:
            self.reshard()


def settle_by(ref: weakref.ref[Unit]) -> None:
    """`settle_partials` of a unit that may be gone."""
    unit = ref()
    if unit is not None:
        unit.settle_partials()
