"""The transport over torch.distributed process groups: Gloo on CPU, NCCL on CUDA, any other.

    gather   shard buffer -> (cast) -> all-gather -> copy-out -> gathered buffer
    reduce   gradients -> copy-in -> reduce-scatter -> times scale

One collective per bucket and direction, one call for a copy where all parts take equal space, else
one or two strided copies per parameter (`layout.moves`). A bucket whose gathered buffer is
rank-major by itself (`layout.is_rank_major`) is gathered in place, without staging; on accelerators
so are buckets of large parameters (`in_place`). Buckets that padding would inflate (`sends_padded`
is False) are moved by one broadcast, or reduce, per owning rank. An axis of size 1 issues nothing.
Fused copy-in and copy-out are FSDP2's idea.

Process groups order collectives by themselves, so entering and leaving the engine need no fence
here: positions only go into error texts. All ranks must issue the same collectives in the same
order.

Streams (CUDA): everything is enqueued on the caller's current stream, `wait` included. Who issues
on a lane waits on that lane, and makes the compute stream wait for it before it computes on. Until
then a handle keeps what its collectives read and write; gradients are packed before (`pack`), on
the stream that they came on. (tests/races holds all of it.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch_compat import ALL_GATHER, REDUCE_SCATTER, backend_name, coalesces
from shardwise.comm.c10d import tree as tree_sums
from shardwise.comm.c10d import wired
from shardwise.comm.c10d.bucket import C10dBucket
from shardwise.comm.c10d.in_place import (
    WIRE_DTYPES,
    GradsInPlace,
    InPlaceGather,
    gather_pays,
    reduce_pays,
)
from shardwise.comm.c10d.packed_grads import PackedGrads, ReducePlan
from shardwise.comm.c10d.staging import GatherPlan, GatherStaging
from shardwise.comm.groups import on_host
from shardwise.comm.ordered import Issued, Ordered
from shardwise.comm.transport import DONE, Axis, GradBuffer, Handle
from shardwise.comm.tree_sum import TreeSum
from shardwise.comm.watch import ORIGINALS, is_watched
from shardwise.layout import BucketLayout, Packing, ReduceLayout

CPU = torch.device("cpu")
_OF_SHARDS = frozenset(
    ("all_gather", "all_gather_all", "broadcast")
)  # collectives that move whole buckets
_ABSENT = object()  # is no function's original


class C10dTransport(Ordered[C10dBucket]):
    """Moves buckets with the process groups of its two axes; see the module's docstring."""

    name = "c10d"
    takes_custom_collectives = sums_in_tree = takes_bytes = takes_wires = True

    def __init__(self, shard: Axis, replicate: Axis, device: torch.device = CPU) -> None:
        super().__init__(shard, replicate, device)
        self._num_attached = 0
        self.sums_late = self._streams.is_async
        self._sums_by_gloo: bool | None = None  # asked at the first reduction
        self._starts_several: bool | None = None  # asked at the first gather

    def attach(self, name: str, layout: BucketLayout, device: torch.device) -> C10dBucket:
        self._shard.check(name, layout.world)
        # Zeros: padding is sent with the rest and should not carry what the allocator left there.
        buffer = torch.zeros(layout.chunk_numel, dtype=layout.dtype, device=device)
        self._num_attached += 1
        axes = (self._shard, self._replicate)
        number, device = self._num_attached, self._device
        return C10dBucket(name, layout, *axes, buffer, self._streams, number, device=device)

    def gather(self, bucket: C10dBucket, shard: torch.Tensor, out: torch.Tensor) -> Handle:
        """`shard` may have the stored or the gather dtype and lie on the host; `out` decides."""
        if bucket.shard.size == 1:
            if shard.data_ptr() != out.data_ptr():
                out.copy_(shard, non_blocking=True)
            return DONE
        if not out.numel():
            return DONE
        if bucket.is_wired and wired.gathers(bucket):
            return wired.gather(self, self._issue, bucket, shard, out)
        plan = bucket.gather_plan or GatherPlan.of(bucket)
        custom = bucket.all_gather
        is_async = self._streams.is_async
        if is_async and custom is None and self._coalesces and gather_pays(bucket.layout):
            return self._gather_in_place(bucket, shard, out)
        memory = bucket.memory if custom is None else custom
        staging = None if plan.in_place else GatherStaging.take(bucket, plan, out, memory)
        packed = out if staging is None else staging.packed
        if shard.dtype != out.dtype or shard.device != out.device or not plan.padded:
            own = plan.packing.chunk(out, bucket.shard.rank) if staging is None else staging.own
            own.copy_(shard[: own.numel()], non_blocking=True)
            shard = own
        if plan.padded:
            call = _all_gather if custom is None else _users("all_gather", custom)
            works = [self._issue(bucket, call, packed, shard, bucket.shard.group)]
        else:
            works = self._per_owner(bucket, _broadcast, plan.packing, packed, bucket.shard.group)
        # The collective reads the shard until then.
        unpack = None if staging is None else staging.unpack
        return Issued(self, bucket, works, "gather", unpack, shard)

    def _gather_in_place(
        self, bucket: C10dBucket, shard: torch.Tensor, out: torch.Tensor
    ) -> Handle:
        views = InPlaceGather.take(bucket, shard, out)
        views.fill()
        works = [
            self._issue(bucket, _all_gather_all, views.wholes, views.parts, bucket.shard.group)
        ]
        return Issued(self, bucket, works, "gather", views.give_back, shard)

    @property
    def _coalesces(self) -> bool:
        """On a device: several collectives can start as one."""
        if self._starts_several is None:
            self._starts_several = coalesces(self._shard.group, self._device)
        return self._starts_several

    def grad_buffer(
        self, bucket: C10dBucket, layout: ReduceLayout, out: torch.Tensor, pre_scale: float = 1.0
    ) -> GradBuffer:
        plan = ReducePlan.of(bucket, layout)
        can = self._streams.is_async and bucket.shard.size > 1 and bucket.reduce_scatter is None
        can = can and not bucket.is_wired
        if can and self._coalesces and reduce_pays(layout):
            return GradsInPlace(bucket, plan, out, pre_scale)
        return PackedGrads(bucket, plan, out, pre_scale)

    def reduce(
        self, bucket: C10dBucket, grads: GradBuffer, out: torch.Tensor, scale: float
    ) -> Handle:
        if isinstance(grads, GradsInPlace):
            return self._reduce_in_place(bucket, grads, out, scale)
        assert isinstance(grads, PackedGrads), (
            f"{type(grads).__name__} was made by another transport"
        )
        if bucket.is_wired and out.numel() and wired.reduces(bucket):
            return wired.reduce(self, self._issue, bucket, grads, out, scale)
        plan, staging = grads.plan, grads.finish()
        packed = staging.packed
        if bucket.shard.size == 1:
            _scale(out, scale)
            return DONE
        if not out.numel():
            return DONE
        in_place = False
        if plan.padded:
            custom = bucket.reduce_scatter
            call = (
                _reduce_scatter
                if custom is None
                else _users("reduce_scatter", custom, op=dist.ReduceOp.SUM)
            )
            in_place = custom is None and self._scatters_by_all_reduce(packed)
            call = _reduce_in_place if in_place else call
            works = [self._issue(bucket, call, out, packed, bucket.group_of_sums)]
        else:
            works = self._per_owner(bucket, _reduce, plan.packing, packed, bucket.group_of_sums)

        def finish() -> None:
            if not plan.padded:
                plan.unpack_own(packed, out)
            elif in_place:  # the sum is in the packed gradients
                out.copy_(plan.packing.chunk(packed, bucket.shard.rank))
            staging.give_back()
            _scale(out, scale)

        return Issued(self, bucket, works, "reduce", finish)

    def _reduce_in_place(
        self, bucket: C10dBucket, grads: GradsInPlace, out: torch.Tensor, scale: float
    ) -> Handle:
        read, written = grads.take(out)
        works = [self._issue(bucket, _reduce_scatter_all, written, read, bucket.group_of_sums)]
        return Issued(self, bucket, works, "reduce", partial(_scale, out, scale), read)

    def all_reduce(self, bucket: C10dBucket, out: torch.Tensor) -> Handle:
        if bucket.replicate.size == 1 or not out.numel():
            return DONE
        if bucket.is_wired and bucket.layout.wire.replicate.reduce.is_lossy:
            return wired.all_reduce(self, self._issue, bucket, out)
        works = [self._issue(bucket, _all_reduce, out, bucket.replicate.group)]
        return Issued(self, bucket, works, "all_reduce")

    def collect(
        self,
        bucket: C10dBucket,
        grads: GradBuffer,
        out: torch.Tensor,
        tree: TreeSum,
        leaves: tuple[int | None, ...],
    ) -> Handle:
        keeps = None
        if isinstance(grads, GradsInPlace):
            grads, keeps = grads.packed()
        assert isinstance(grads, PackedGrads), f"{type(grads).__name__} is another transport's"
        return tree_sums.collect(self, self._issue, bucket, grads, out, tree, leaves, keeps)

    def complete(self, bucket: C10dBucket, tree: TreeSum) -> Handle:
        return tree_sums.complete(self, self._issue, bucket, tree)

    def agree(self, flags: list[bool]) -> list[bool]:
        """One small MAX all-reduce per axis with peers. The host waits, because it steers by the
        answer: for its peers, and not for what they have queued on their devices (`on_host`).
        """
        axes = [axis for axis in (self._shard, self._replicate) if axis.size > 1]
        if not axes or not flags:
            return list(flags)
        for check in self._checks:
            check.note("agreement", f"{len(flags)} flags", len(flags))
        for axis in axes:
            group, device = on_host(axis.ranks, axis.group, self._device)
            votes = torch.tensor(flags, dtype=torch.int32, device=device)
            work = dist.all_reduce(votes, dist.ReduceOp.MAX, group, async_op=True)
            self.wait_for(work, "all_reduce of what ranks agree on", on_host=device.type == "cpu")
            flags = [bool(vote) for vote in votes.tolist()]
        return flags

    def close(self) -> None:
        """Nothing to give back: process groups belong to the mesh."""

    def _scatters_by_all_reduce(self, packed: torch.Tensor) -> bool:
        """Gloo reduce-scatters by all-reducing a clone: sum in `packed` itself, to the same bits.
        Tools that watch, and the check of the DETAIL debug level, see what was meant.
        """
        if self._sums_by_gloo is None:
            is_gloo = packed.is_cpu and backend_name(self._shard.group, packed.device) == "gloo"
            self._sums_by_gloo = is_gloo and dist.get_debug_level() != dist.DebugLevel.DETAIL
        return self._sums_by_gloo and not is_watched()

    def _issue(self, bucket: C10dBucket, call: Callable[..., Any], *args: Any) -> Any:
        kind, plan = call.__name__.strip("_"), bucket.reduce_plan
        of_shards = plan is None or kind in _OF_SHARDS or kind.startswith("gather_")
        members = "" if plan is None or of_shards else plan.layout.members
        for check in self._checks:
            check.note(kind, bucket.name, bucket.number, members)
        try:
            return call(*args)
        except RuntimeError as error:
            raise self.failure(f"{call.__name__.strip('_')} of {bucket.name}", error) from error

    def _per_owner(
        self,
        bucket: C10dBucket,
        call: Callable[..., Any],
        packing: Packing,
        packed: torch.Tensor,
        group: dist.ProcessGroup | None,
    ) -> list[Any]:
        """One collective for each rank's part that is not empty."""
        works = []
        for rank, owner in enumerate(bucket.shard.ranks):
            part = packing.chunk(packed, rank)
            if part.numel():
                works.append(self._issue(bucket, call, part, owner, group))
        return works


def _scale(out: torch.Tensor, scale: float) -> None:
    if scale != 1.0:
        out.mul_(_factor(scale) if out.dtype is torch.float32 else scale)


@lru_cache
def _factor(scale: float) -> torch.Tensor:
    """A number that torch need not make a tensor of each time; the product has the same bits."""
    return torch.tensor(scale, dtype=torch.float64, device="cpu")


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in WIRE_DTYPES else tensor.view(torch.uint8)


# Functions of torch.distributed are looked up at each call: tools count and replace them there. The
# usual call goes to the process group at once, since the function takes as long again as the group
# does. Older names warn since 2.13, newer ones do not exist before.
def _all_gather(out: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    if out.dtype not in WIRE_DTYPES:
        out, part = out.view(torch.uint8), part.view(torch.uint8)
    call = getattr(dist, "all_gather_single", None)
    if call is ORIGINALS.get("all_gather_single", _ABSENT) and group is not None:
        return group.all_gather_single(out, part, ALL_GATHER)  # type: ignore[attr-defined]
    return (call or dist.all_gather_into_tensor)(out, part, group=group, async_op=True)


def _reduce_scatter(
    out: torch.Tensor, packed: torch.Tensor, group: dist.ProcessGroup | None
) -> Any:
    call = getattr(dist, "reduce_scatter_single", None)
    if call is ORIGINALS.get("reduce_scatter_single", _ABSENT) and group is not None:
        return group.reduce_scatter_single(out, packed, REDUCE_SCATTER)  # type: ignore[attr-defined]
    call = call or dist.reduce_scatter_tensor
    return call(out, packed, op=dist.ReduceOp.SUM, group=group, async_op=True)


def _all_gather_all(
    wholes: list[torch.Tensor], parts: list[torch.Tensor], group: dist.ProcessGroup | None
) -> Any:
    return _group(group).allgather_into_tensor_coalesced(wholes, parts, ALL_GATHER)


def _reduce_scatter_all(
    written: list[torch.Tensor], read: list[torch.Tensor], group: dist.ProcessGroup | None
) -> Any:
    return _group(group).reduce_scatter_tensor_coalesced(written, read, REDUCE_SCATTER)


def _group(group: dist.ProcessGroup | None) -> Any:
    return dist.group.WORLD if group is None else group


def _reduce_in_place(out: Any, packed: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    return dist.all_reduce(packed, op=dist.ReduceOp.SUM, group=group, async_op=True)


_reduce_in_place.__name__ = _reduce_scatter.__name__  # ranks that differ in it still agree


def _all_reduce(out: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    return dist.all_reduce(out, op=dist.ReduceOp.SUM, group=group, async_op=True)


def _broadcast(part: torch.Tensor, owner: int, group: dist.ProcessGroup | None) -> Any:
    return dist.broadcast(_wire(part), src=owner, group=group, async_op=True)


def _reduce(part: torch.Tensor, owner: int, group: dist.ProcessGroup | None) -> Any:
    return dist.reduce(part, dst=owner, op=dist.ReduceOp.SUM, group=group, async_op=True)


def _users(name: str, comm: Any, **more: Any) -> Callable[..., Any]:
    """A collective that the user brings (FSDP2's `set_custom_all_gather`, `..._reduce_scatter`): an
    object that allocates staging and runs it, returning a work or None.
    """

    def call(out: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
        work = comm(output_tensor=out, input_tensor=part, group=group, async_op=True, **more)
        return work if work is not None else DONE

    call.__name__ = name
    return call
