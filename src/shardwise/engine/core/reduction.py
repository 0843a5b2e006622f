"""A reduction on its way: waited for, summed over the replicas, delivered into `.grad`.

deliver     this rank's part of the sum is added to `.grad`; a parameter without a gradient on any
            rank stays None
replica     without all-reduce the sum over the shard axis is kept, and joins the next all-reduce
home        where replicas share a shard out, that all-reduce is a reduce-scatter (see `stages`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import local_of, post_accumulate_hooks, tensor_hooks, unflatten
from shardwise.comm.transport import Handle
from shardwise.engine.core.bucket import BucketState
from shardwise.engine.core.parameter import ShardedParam
from shardwise.engine.tensor.shard_tensor import ShardTensor, settle
from shardwise.layout import ReduceLayout

if TYPE_CHECKING:
    from shardwise.engine.core.gradients import BucketGrads


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
    before: torch.Tensor | None = None  # the sum over shards, which a lane may still read

    @property
    def is_done(self) -> bool:
        """Finishing it would wait for nobody."""
        done = getattr(self.handle, "done", False)
        return done and self.grads.state.mesh.replicate.size == 1

    def wait(self) -> None:
        """Wait, drop the result. After an exception peers may still read what this rank posted, and
        collectives still write into what goes.
        """
        self.handle.wait()
        if self.over_replicas is not None:
            self.over_replicas.wait()

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
            self.before = self.out
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
        hook = self.grads.state.unit().settings.all_reduce_hook
        if hook is not None:
            hook(self.out[: self.layout.data_numel(self.grads.state.own_rank)])
        self._deliver(run_hooks)

    def finish_on_lane(self, *, run_hooks: bool = True) -> None:
        """Finish where it runs; the compute stream, which allocates from here on, comes behind."""
        streams = self.grads.state.streams
        with torch.no_grad(), streams.lane("reduce"):
            self.finish(run_hooks=run_hooks)
        streams.wait(streams.record("reduce"))

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
        receivers = grads.receivers
        if receivers is None or receivers.key != (layout, state.num_forms):
            receivers = grads.receivers = Receivers(state, layout)
        data = self.out.to(state.layout.grad_dtype)  # itself where it is so already
        if state.offload:
            data = state.streams.to_host(data, pinned=state.pins_memory)
            if receivers.are_read_at_once:
                state.streams.land()
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

    @property
    def are_read_at_once(self) -> bool:
        """Delivering reads the sums: it adds them to others, or hooks see them."""
        held = (param.sharded for param in self._params)
        return any(
            p.grad is not None or p._backward_hooks or p._post_accumulate_grad_hooks for p in held
        )

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
                deliver(param, grad, run_hooks=run_hooks)

    def _parts(self, data: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views of this rank's parts in the result."""
        if self._like is not None:
            return unflatten(data, self._like)
        return [data[at : at + numel].view(shape) for at, numel, shape in self._places]


def deliver(param: ShardedParam, grad: Any, *, run_hooks: bool) -> None:
    """Add this rank's part of a reduced gradient, a `ShardTensor`, to `.grad`, with the hooks that
    autograd would have run.
    """
    if param.partial_grad is not None or param.partial is not None:
        param.forget_partial()
    sharded = param.sharded
    grad._param_name = f"{param.name}.grad"
    if run_hooks and sharded._backward_hooks:
        for hook in tensor_hooks(sharded):
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        if type(grad) is not ShardTensor:
            local = local_of(grad) if isinstance(grad, DTensor) else grad
            grad = ShardTensor(local, param.grad_spec, name=f"{param.name}.grad")
    existing = sharded.grad
    if existing is None:
        sharded.grad = grad
    else:
        settle((existing,))  # a thread may still step with it
        local_of(existing).add_(local_of(grad))  # type: ignore[arg-type]
    if run_hooks and sharded._post_accumulate_grad_hooks:
        for accumulated in post_accumulate_hooks(sharded):
            accumulated(sharded)
