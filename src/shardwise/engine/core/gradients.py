"""Gradients of a unit: from autograd's accumulators into reductions.

arrival     full gradients leave the full parameters for the buffer of a reduction: a large one when
            autograd has put it there, small ones together (`arrivals`)
complete    all trainable parameters have arrived: the reduction may be issued (when, says
            `backward`; what follows is in `reduction`)
partial     without sync a full gradient is added up on this rank instead; `.grad` then stands for
            it (`Pending`)
route       how gradients get into a reduction. All units share the usual one; who needs another
            (ranks without data, sums in a fixed order) gives the unit a subclass
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import attrgetter, is_

import torch

from shardwise.comm.transport import Bucket, GradBuffer, Missing
from shardwise.engine.core.arrivals import Arrivals
from shardwise.engine.core.bucket import BucketState
from shardwise.engine.core.reduction import Receivers, Reduction
from shardwise.engine.core.settings import Settings
from shardwise.engine.core.tally import Tally
from shardwise.engine.core.weight import Scale, Weight
from shardwise.layout import ReduceLayout, layout_reduce

Taken = list[tuple[int, torch.Tensor]]  # gradients, by the index of their parameter

# What is asked of all parameters, or buckets, is asked by one `map`, which stays in C.
_trains = attrgetter("full.requires_grad")
_partial_grad = attrgetter("partial_grad")
_is_complete = attrgetter("is_complete")
_has_frozen = attrgetter("arrivals.has_frozen")


def plain(grad: torch.Tensor) -> torch.Tensor:
    """A gradient as reductions take it: strided and real. A sparse one (embeddings) is filled up,
    since other ranks have other rows; a complex one is two reals an element.
    """
    grad = grad if grad.layout is torch.strided else grad.to_dense()
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


# Whose gradients a transport's bucket carries; neither keeps the other.
_CARRIED: weakref.WeakKeyDictionary[Bucket, weakref.ref[BucketGrads]] = weakref.WeakKeyDictionary()


def carried_in(bucket: Bucket) -> BucketGrads | None:
    """None once their unit has gone."""
    ref = _CARRIED.get(bucket)
    return None if ref is None else ref()


class BucketGrads:
    """The reduction that a bucket is collecting, and what it keeps between backwards."""

    def __init__(self, state: BucketState, settle: Callable[[], None]) -> None:
        self.state = state
        self._settle = settle
        self.layout: ReduceLayout | None = None
        self.buffer: GradBuffer | None = None
        self.out: torch.Tensor | None = None
        self.tally = Tally()
        self.arrived = 0  # mask of parameters whose gradient is in the buffer
        self.replica: torch.Tensor | None = None  # summed over the shard axis only
        self.arrivals = Arrivals(state)
        self._is_complex = state.layout.is_complex
        self._are_whole = all(p.spread.whole is None for p in state.params)
        self._flags: tuple[bool, ...] = ()  # which parameters are in the layout
        self.trained = 0  # mask of those that had gradients to come in this accumulation
        self._position: dict[int, int] = {}
        self._awaited = 0  # mask of the parameters in the layout
        self.receivers: Receivers | None = None  # of this rank's parts of the sum

    def carry_in(self, bucket: Bucket) -> None:
        _CARRIED[bucket] = weakref.ref(self)

    # -- collecting ------------------------------------------------------------------------------
    def trainable_layout(self) -> ReduceLayout:
        """Layout of the parameters to reduce now: those that train, and those that did in a former
        backward of this accumulation. Not by what this rank has: ranks may have run other units.
        """
        if self.buffer is not None:
            assert self.layout is not None
            return self.layout  # the reduction under way keeps its layout
        flags = tuple(map(_trains, self.state.params))
        if self.trained:
            flags = tuple(now or bool(self.trained >> i & 1) for i, now in enumerate(flags))
        return self._lay_out(flags)

    def note_trainable(self) -> None:
        """A backward without sync begins, on all ranks: its parameters belong to the reduction."""
        self.arrivals.watch_again(self)
        for i, param in enumerate(self.state.params):
            self.trained |= param.full.requires_grad << i

    def _lay_out(self, flags: tuple[bool, ...]) -> ReduceLayout:
        if self.layout is None or flags != self._flags:
            if self.replica is not None:
                raise RuntimeError(
                    f"{self.state.name}: requires_grad changed while gradients wait for their "
                    "all-reduce; finish the accumulation (set_requires_all_reduce(True) and a "
                    "backward) or clear the gradients before"
                )
            self.layout = layout_reduce(self.state.layout, flags)
            self._flags = flags
            self._position = {i: j for j, i in enumerate(self.layout.indices)}
            self._awaited = sum(1 << i for i in self.layout.indices)
        return self.layout

    def open(self, scale: Scale, *, joins: Missing | None = None) -> None:
        """Start a reduction and move partial gradients into it. One that peers have and this rank
        `joins` is about the parameters that it is about there.
        """
        assert self.state.bucket is not None
        there = None if joins is None else joins.indices
        if there is None:
            layout = self.trainable_layout()
        else:
            layout = self._lay_out(tuple(i in there for i in range(len(self.state.params))))
        self.out = self._new_out(layout, is_early=True)
        self.buffer = self.state.transport.grad_buffer(
            self.state.bucket, layout, self.out, scale.before
        )
        self.arrived = 0
        for i, j in self._position.items() if self._keeps_partial else ():
            param = self.state.params[i]
            param.drop_cleared()
            if param.partial is not None:
                self.buffer.put(j, param.partial)
                param.partial = None

    def _new_out(self, layout: ReduceLayout, *, is_early: bool) -> torch.Tensor:
        """Where the sum goes: no memory before it is reduced, where the transport needs none."""
        waits = is_early and self.state.transport.sums_late and layout.world > 1
        numel, device = 0 if waits else layout.chunk_numel, self.state.mesh.device
        return torch.empty(numel, dtype=layout.dtype, device=device)

    @property
    def is_complete(self) -> bool:
        """Every gradient has arrived that is to come; at once where none is."""
        if self.buffer is None:
            self.trainable_layout()
            return not self._awaited
        return self.arrived == self._awaited

    def take_out(self, indices: Iterable[int]) -> Taken:
        """What is in the accumulators of some full parameters, as reductions take it."""
        found: Taken = []
        told, creates_graph = 0, torch.is_grad_enabled()
        for i in indices:
            param = self.state.params[i]
            full = param.full
            grad, full.grad = full.grad, None
            if grad is None or not param.sharded.requires_grad:
                continue  # an autograd.Function returned None for it; or frozen since the forward
            if creates_graph:
                grad = grad.detach()
            if not self._are_whole:
                grad = param.spread.own_gradient(param.name, grad)
            if grad.layout is not torch.strided or self._is_complex:
                grad = plain(grad)
            found.append((i, grad))
            told |= 1 << i
        self.tally.told |= told
        self.tally.num_told += len(found)
        return found

    def put(self, found: Taken) -> None:
        """Gradients go into the reduction that is open."""
        assert self.buffer is not None
        put, positions, there = self.buffer.put, self._position, 0
        for index, grad in found:
            if index not in positions:
                raise self._unfrozen(index)
            put(positions[index], grad)
            there |= 1 << index
        self.arrived |= there
        self.tally.waiting |= there
        self.tally.num_taken += len(found)

    def _unfrozen(self, index: int) -> RuntimeError:
        """Unfrozen while a backward runs: the reduction under way does not know it."""
        return RuntimeError(
            f"{self.state.params[index].name}: requires_grad changed during a backward; "
            "change it between steps"
        )

    def skip(self, found: Taken) -> None:
        """Gradients that count as absent; the reduction is open."""
        for index, _ in found:
            self.arrived |= 1 << index
        self.tally.num_taken += len(found)

    def accumulate(self, found: Taken) -> None:
        """Gradients that are not to be reduced yet are added up on this rank."""
        for index, grad in found:
            self.state.params[index].add_partial(
                grad, self.state.layout.reduce_dtype, self.pending(index)
            )
        self.tally.num_taken += len(found)

    def pending(self, index: int) -> ParamPending:
        return ParamPending(self, index, self._settle)

    def zero_replica(self, index: int) -> None:
        """Take one parameter out of what waits for its all-reduce."""
        assert self.replica is not None and self.layout is not None
        position = self._position[index]
        rank = self.state.mesh.shard.rank
        at = self.layout.offsets(rank)[position]
        self.replica[at : at + self.layout.params[position].shard_numel(rank)] = 0
        self.replica[self.layout.counts_offset + position] = 0

    @property
    def _keeps_partial(self) -> bool:
        """Some `.grad` stands for more than what is in it."""
        return not all(map(is_, map(_partial_grad, self.state.params), repeat(None)))

    @property
    def has_partial(self) -> bool:
        if not self._keeps_partial:
            return self.replica is not None
        for param in self.state.params:
            param.drop_cleared()
        return any(p.partial is not None for p in self.state.params) or self.replica is not None

    def discard(self) -> None:
        """An exception ended the backward: what was collected is not reduced."""
        if self.buffer is not None:
            self.buffer.discard()
        self.buffer = self.out = None
        self.arrived = 0
        self.tally.clear()

    # -- reducing --------------------------------------------------------------------------------
    def issue(self, scale: Scale, all_reduce: bool, *, joins: Missing | None = None) -> Reduction:
        """Issue the reduction of what was collected (zeros where nothing arrived)."""
        buffer, out, layout, had = self.take(scale, joins=joins)
        state = self.state
        assert state.bucket is not None
        with state.streams.lane("reduce"):
            handle = state.transport.reduce(state.bucket, buffer, out, scale.after)
            reduction = Reduction(self, handle, out, layout, had, all_reduce)
            if layout.world == 1 and all_reduce:
                reduction.start_all_reduce()  # nothing to wait for before
        return reduction

    def take(
        self, scale: Scale, *, joins: Missing | None
    ) -> tuple[GradBuffer, torch.Tensor, ReduceLayout, tuple[bool, ...]]:
        """What was collected, for a reduction that is issued now: gradients, where the sum goes,
        their layout, which are there. `joins`: peers have some, this rank has nothing. On
        accelerators they are packed here, on the stream that they came on: no other reads them.
        """
        tally = self.tally
        if self.buffer is None:
            tally.repeated += bool(tally.issued) and joins is None
            self.open(scale, joins=joins)
        buffer, out, layout = self.buffer, self.out, self.layout
        assert buffer is not None and out is not None and layout is not None
        if self.state.streams.is_async and (pack := getattr(buffer, "pack", None)) is not None:
            pack()
        if not out.numel() and self.state.transport.sums_late:
            out = self._new_out(layout, is_early=False)
        had = buffer.had
        if tally.waiting and not all(had):
            tally.lost |= sum(
                1 << i
                for i, there in zip(layout.indices, had, strict=True)
                if not there and tally.waiting >> i & 1
            )
        tally.waiting = 0
        tally.issued += 1
        self.buffer = self.out = None
        self.arrived = 0
        return buffer, out, layout, had


class ParamPending:
    """What the `.grad` of one parameter stands for, beside the numbers in it: a partial sum, or
    one over shards only.
    """

    def __init__(self, grads: BucketGrads, index: int, settle: Callable[[], None]) -> None:
        self._grads = weakref.ref(grads)
        self._index = index
        self.settle = settle

    def drop(self) -> None:
        """Somebody cleared `.grad`: this goes with it."""
        grads = self._grads()
        if grads is None:
            return
        grads.state.params[self._index].forget_partial()
        if grads.replica is not None:
            grads.zero_replica(self._index)


class Route:
    """The usual one: into the reduction that a bucket collects, or into partial sums where the
    backward does not sync. It keeps nothing.
    """

    counts = True  # this rank's gradients are part of the sum
    refuses_counts = ""  # why gradients cannot be divided by a count, if they cannot

    def take(self, gradients: Gradients, bucket: BucketGrads, found: Taken) -> None:
        """Full gradients have arrived."""
        if not gradients.settings.requires_sync:
            self.accumulate(gradients, bucket, found)
            return
        if bucket.buffer is None:
            bucket.open(gradients.scale(bucket))
        self.put(gradients, bucket, found)

    def put(self, gradients: Gradients, bucket: BucketGrads, found: Taken) -> None:
        """Full gradients are to go into the reduction that is open."""
        bucket.put(found)

    def accumulate(self, gradients: Gradients, bucket: BucketGrads, found: Taken) -> None:
        """Full gradients are to be added up on this rank."""
        bucket.accumulate(found)

    def issue(
        self, gradients: Gradients, bucket: BucketGrads, *, joins: Missing | None
    ) -> Reduction:
        """Reduce what a bucket has collected; `joins`: peers have some, this rank has nothing."""
        all_reduce = gradients.settings.requires_all_reduce
        return bucket.issue(gradients.scale(bucket), all_reduce, joins=joins)

    def holds_sums(self, gradients: Gradients) -> bool:
        """Whether the route itself keeps sums of a unit that the end of this backward reduces."""
        return False

    def failed(self) -> None:
        """What was collected is incomplete, after an exception or with a new layout."""


USUAL = Route()


class Gradients:
    """Those of a unit. `weight` is that of its context; `delivers_early`: into `.grad` as soon as
    all ranks have handed theirs in.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.buckets: list[BucketGrads] = []
        self.weight = Weight()
        self.route: Route = USUAL
        self.delivers_early = False
        self.accumulates = False  # a backward without sync has begun
        self._is_accumulated = False  # and one with sync behind it

    def scale(self, bucket: BucketGrads) -> Scale:
        state = bucket.state
        return self.weight.scale(state.mesh, state.layout.reduce_dtype, self.settings.divide_by)

    # -- hearing ---------------------------------------------------------------------------------
    @property
    def has_frozen(self) -> bool:
        return any(map(_has_frozen, self.buckets))

    def watch(self) -> None:
        """Whoever uses the full parameters, their gradients are heard of."""
        for bucket in self.buckets:
            bucket.tally.trainable = bucket.arrivals.watch(bucket)

    def agree_on_flags(self) -> None:
        """`requires_grad` as users have set it on either form since it was last looked at."""
        for bucket in self.buckets:
            bucket.arrivals.watch_again(bucket)

    def backward_begins(self) -> None:
        """Which parameters belong to the reduction follows from what backwards have begun, on all
        ranks: those to come may fail, on one of them before it has reduced anything.
        """
        if self._is_accumulated:
            self._is_accumulated = self.accumulates = False
            for bucket in self.buckets:
                bucket.trained = 0
        if self.settings.requires_sync:
            self.end_accumulation()
        else:
            self.accumulates = True
            for bucket in self.buckets:
                bucket.note_trainable()

    def end_accumulation(self) -> None:
        """All ranks are to reduce now; the next backward is of another accumulation."""
        self._is_accumulated = self.accumulates

    # -- collecting ------------------------------------------------------------------------------
    def arrived(self, bucket: BucketGrads, indices: Iterable[int]) -> bool:
        """Full gradients are in their accumulators. True when they were the unit's last."""
        found = bucket.take_out(indices)
        if not found:
            return False
        self.route.take(self, bucket, found)
        return self.settings.requires_sync and self.are_complete

    def collect(self) -> bool:
        """Take in gradients of small parameters that nobody was told of. True when the unit has all
        that it waits for, by one of them.
        """
        completed = False
        for bucket in self.buckets:
            if indices := bucket.arrivals.unheard():
                completed = self.arrived(bucket, indices)
        return completed

    def collect_left(self) -> None:
        """Take in gradients that somebody else than autograd's accumulator put on full parameters:
        pipeline schedules that compute gradients of weights by themselves do.
        """
        for bucket in self.buckets:
            if found := bucket.take_out(range(len(bucket.state.params))):
                self.route.accumulate(self, bucket, found)

    @property
    def are_complete(self) -> bool:
        """Those of all trainable parameters have arrived."""
        return all(map(_is_complete, self.buckets))

    @property
    def are_unreduced(self) -> bool:
        """Some were put into a reduction that was not issued, or partial ones wait for a sync."""
        if any(b.buffer is not None or b.has_partial for b in self.buckets):
            return True
        return self.route.holds_sums(self)

    # -- reducing --------------------------------------------------------------------------------
    def issue(self) -> list[Reduction]:
        """Reduce every trainable bucket."""
        issue = self.route.issue
        return [issue(self, b, joins=None) for b in self.buckets if b.trainable_layout().indices]

    def settle(self) -> None:
        """Reduce partial gradients now, because somebody reads them: as they are, whatever the
        route.
        """
        waiting = [bucket for bucket in self.buckets if bucket.has_partial]
        for reduction in [bucket.issue(self.scale(bucket), True) for bucket in waiting]:
            reduction.finish_on_lane(run_hooks=False)
        for bucket in waiting:
            bucket.state.streams.land()
            bucket.tally.clear()
        self.weight.count = None

    def discard(self) -> None:
        """An exception ended the backward: what was collected is not reduced."""
        self.route.failed()
        for bucket in self.buckets:
            bucket.discard()
