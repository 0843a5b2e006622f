"""Gradients of one bucket: from autograd's accumulator to the sharded `.grad`.

arrival     a full gradient leaves the full parameter for the reduction's buffer, small ones
            together (`arrivals`)
complete    all trainable parameters have arrived: the reduction may be issued
deliver     this rank's part of the sum is added to `.grad`; a parameter without a gradient on any
            rank stays None
partial     without sync a full gradient is added up on this rank instead; `.grad` then stands for
            it (`Pending`)
replica     without all-reduce the sum over the shard axis is kept, and joins the next all-reduce
home        where replicas share a shard out, that all-reduce is a reduce-scatter (see `stages`)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_

import torch

from shardwise._torch_compat import unflatten
from shardwise.comm.transport import Bucket, GradBuffer, Handle, Missing
from shardwise.engine.core.arrivals import Arrivals
from shardwise.engine.core.bucket import BucketState
from shardwise.engine.core.route import Scale
from shardwise.engine.core.tally import Tally
from shardwise.engine.tensor.shard_tensor import ShardTensor
from shardwise.layout import ReduceLayout, layout_reduce

# What is asked of all parameters of a bucket is asked by one `map`, which stays in C.
_trains = attrgetter("full.requires_grad")
_partial_grad = attrgetter("partial_grad")


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
        self.takes_plain_gradients = all(p.spread.whole is None for p in state.params)
        self._flags: tuple[bool, ...] = ()  # which parameters are in the layout
        self._trained = 0  # mask of those that had gradients to come since the last reduction
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
        if self._trained:
            flags = tuple(now or bool(self._trained >> i & 1) for i, now in enumerate(flags))
        return self._lay_out(flags)

    def note_trainable(self) -> None:
        """A backward without sync begins, on all ranks: its parameters belong to the reduction."""
        self.arrivals.watch_again(self)
        for i, param in enumerate(self.state.params):
            self._trained |= param.full.requires_grad << i

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
        device = self.state.mesh.device
        self.out = torch.empty(layout.chunk_numel, dtype=layout.dtype, device=device)
        self.buffer = self.state.transport.grad_buffer(
            self.state.bucket, layout, self.out, scale.before
        )
        self.arrived = self._trained = 0
        for i, j in self._position.items() if self._keeps_partial else ():
            param = self.state.params[i]
            param.drop_cleared()
            if param.partial is not None:
                self.buffer.put(j, param.partial)
                param.partial = None

    @property
    def is_complete(self) -> bool:
        """Every gradient has arrived that is to come; at once where none is."""
        if self.buffer is None:
            self.trainable_layout()
            return not self._awaited
        return self.arrived == self._awaited

    def put(self, index: int, grad: torch.Tensor) -> None:
        """A gradient arrived; the reduction is open."""
        self.put_all([(index, grad)])

    def put_all(self, arrived: list[tuple[int, torch.Tensor]]) -> None:
        """Several gradients arrived; the reduction is open."""
        assert self.buffer is not None
        put, positions, there = self.buffer.put, self._position, 0
        for index, grad in arrived:
            if index not in positions:
                raise self._unfrozen(index)
            is_plain = grad.layout is torch.strided and not self._is_complex
            put(positions[index], grad if is_plain else plain(grad))
            there |= 1 << index
        self.arrived |= there
        tally = self.tally
        tally.waiting |= there
        tally.num_taken += len(arrived)

    def _unfrozen(self, index: int) -> RuntimeError:
        """Unfrozen while a backward runs: the reduction under way does not know it."""
        return RuntimeError(
            f"{self.state.params[index].name}: requires_grad changed during a backward; "
            "change it between steps"
        )

    def skip(self, index: int) -> None:
        """A gradient arrived that counts as absent; the reduction is open."""
        self.arrived |= 1 << index
        self.tally.num_taken += 1

    def accumulate(self, index: int, grad: torch.Tensor) -> None:
        """A gradient arrived that is not to be reduced yet."""
        self.state.params[index].add_partial(
            plain(grad), self.state.layout.reduce_dtype, self.pending(index)
        )
        self.tally.num_taken += 1

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
        assert self.state.bucket is not None
        handle = self.state.transport.reduce(self.state.bucket, buffer, out, scale.after)
        reduction = Reduction(self, handle, out, layout, had, all_reduce)
        if layout.world == 1 and all_reduce:
            reduction.start_all_reduce()  # nothing to wait for before
        return reduction

    def take(
        self, scale: Scale, *, joins: Missing | None
    ) -> tuple[GradBuffer, torch.Tensor, ReduceLayout, tuple[bool, ...]]:
        """What was collected, for a reduction that is issued now: gradients, where the sum goes,
        their layout, which are there. `joins`: peers have some, this rank has nothing.
        """
        tally = self.tally
        if self.buffer is None:
            tally.repeated += bool(tally.issued) and joins is None
            self.open(scale, joins=joins)
        buffer, out, layout = self.buffer, self.out, self.layout
        assert buffer is not None and out is not None and layout is not None
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


@dataclass(slots=True)
class Reduction:
    """A reduction on its way. `finish` waits, sums over the replicas, and delivers."""

    grads: BucketGrads
    handle: Handle
    out: torch.Tensor
    layout: ReduceLayout
    had: tuple[bool, ...]
    all_reduce: bool
    over_replicas: Handle | None = None

    @property
    def is_done(self) -> bool:
        """Finishing it would wait for nobody."""
        done = getattr(self.handle, "done", False)
        return done and self.grads.state.mesh.replicate.size == 1

    def wait(self) -> None:
        """Wait, drop the result. After an exception peers may still read what this rank posted."""
        self.handle.wait()

    def advance(self) -> None:
        """Wait for the first stage and issue the next, so that peers which finish in another order
        do not wait for it.
        """
        self.handle.wait()
        if self.all_reduce and self.over_replicas is None:
            self.start_all_reduce()

    def start_all_reduce(self) -> None:
        """Sum over the replicas, with what was kept from before."""
        state = self.grads.state
        if state.mesh.replicate.size == 1:
            return
        assert state.bucket is not None
        if self.grads.replica is not None:
            self.out.add_(self.grads.replica)
            self.grads.replica = None
        if state.home is None:
            self.over_replicas = state.transport.all_reduce(state.bucket, self.out)
        else:
            self.over_replicas, self.out, self.layout = state.home.reduce(
                self.out, self.layout, self.had
            )

    def finish(self, *, run_hooks: bool = True) -> None:
        self.handle.wait()
        if self.grads.state.mesh.replicate.size > 1:
            if not self.all_reduce:
                self._keep_replica()
                return
            if self.over_replicas is None:
                self.start_all_reduce()
            assert self.over_replicas is not None
            self.over_replicas.wait()
        hook = self.grads.state.unit().all_reduce_hook
        if hook is not None:
            hook(self.out[: self.layout.data_numel(self.grads.state.own_rank)])
        self._deliver(run_hooks)

    def _keep_replica(self) -> None:
        self.grads.tally.delivered += 1
        if self.grads.replica is not None:
            self.out.add_(self.grads.replica)
        self.grads.replica = self.out
        for i in self.layout.indices:
            self.grads.state.params[i].mark_pending(self.grads.pending(i))

    def _deliver(self, run_hooks: bool) -> None:
        grads, layout = self.grads, self.layout
        state = grads.state
        grads.tally.delivered += 1
        data = self.out.to(state.layout.grad_dtype)  # itself where it is so already
        if state.offload:
            data = data.to("cpu")
        receivers = grads.receivers
        if receivers is None or receivers.key != (layout, state.num_forms):
            receivers = grads.receivers = Receivers(state, layout)
        # The count is read only where this rank had no gradient, so the usual step never waits for
        # the device.
        had = None
        if not all(self.had):
            had = [
                there or self.out[layout.counts_offset + j].item() != 0
                for j, there in enumerate(self.had)
            ]
        receivers.add(data, had, run_hooks=run_hooks)


class Receivers:
    """The parameters that a reduction delivers to, and where in its result their parts lie."""

    def __init__(self, state: BucketState, layout: ReduceLayout) -> None:
        self.key = (layout, state.num_forms)  # what it was made for
        self._params = [state.params[i] for i in layout.indices]
        self._specs = [param.grad_spec for param in self._params]
        self._is_complex = state.layout.is_complex
        rank = state.own_rank
        pairs = list(zip(layout.params, layout.offsets(rank), strict=True))
        self._places = [(at, p.shard_numel(rank), p.shard_shape(rank)) for p, at in pairs]
        # One call makes all views where parts follow each other and none is empty.
        ends = [at + numel for at, numel, _ in self._places]
        is_dense = [at for at, _, _ in self._places] == [0, *ends][: len(ends)]
        has_all = all(numel for _, numel, _ in self._places)
        like = [torch.empty(shape, device="meta") for _, _, shape in self._places]
        self._like = like if is_dense and has_all else None

    def add(self, data: torch.Tensor, had: list[bool] | None, *, run_hooks: bool) -> None:
        """Add this rank's parts to `.grad`; `had`: of which parameters any rank had a gradient,
        None for all.
        """
        parts = self._parts(data)
        if self._is_complex:
            parts = list(map(torch.view_as_complex, parts))
        made = ShardTensor.gradients(parts, self._specs)
        for j, (param, grad) in enumerate(zip(self._params, made, strict=True)):
            if had is None or had[j]:
                param.add_grad(grad, run_hooks=run_hooks)

    def _parts(self, data: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of this rank's parts in the result."""
        if self._like is not None:
            return unflatten(data, self._like)
        return [data[at : at + numel].view(shape) for at, numel, shape in self._places]


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
