"""Layout of a unit: its buckets under a strategy, the collectives of a step, the bytes it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardwise.layout.bucket import BucketLayout, ParamSpec, group_by_dtype, layout_bucket
from shardwise.layout.home import home_layout, home_reduce
from shardwise.layout.policy import MixedPrecisionPolicy
from shardwise.layout.reduce import ReduceLayout, layout_reduce
from shardwise.layout.strategy import Lifetime, Strategy
from shardwise.layout.wire import Wire


class Moment(StrEnum):
    """When in a step a collective is issued."""

    FORWARD = "forward"
    BACKWARD = "backward"
    POST_BACKWARD = "post_backward"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a step: `size_bytes` is what one rank puts in, at most. `ranks`: of whom,
    where these are not those of the axis: inside hosts, or between them.
    """

    kind: str  # "gather" | "reduce" | "all_reduce"
    axis: str  # "shard" | "replicate"
    moment: Moment
    size_bytes: int
    ranks: int = 0
    is_inside: bool = False  # of a host

    def received_bytes(self, axis_ranks: int) -> float:
        """What one rank takes in, by the least that it needs."""
        ranks = self.ranks or axis_ranks
        if self.kind == "gather":  # the size is one rank's part
            return (ranks - 1) * self.size_bytes
        return (1 + (self.kind == "all_reduce")) * (ranks - 1) / ranks * self.size_bytes


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The parameters of one `fully_shard` call."""

    name: str
    strategy: Strategy
    buckets: tuple[BucketLayout, ...]

    @property
    def reduces(self) -> tuple[ReduceLayout, ...]:
        return tuple(layout_reduce(b) for b in self.buckets)

    @property
    def registered(self) -> tuple[BucketLayout, ...]:
        """Of every bucket what is cut like the optimizer state: its own shards, or their parts."""
        return tuple(home_layout(b, 0) if self._is_split(b) else b for b in self.buckets)

    def _is_split(self, bucket: BucketLayout) -> bool:
        """Replicas share its shards out."""
        return self.strategy.splits_replicas and bucket.replicas > 1

    @property
    def shard_bytes(self) -> int:
        """Bytes of the registered parameters of the rank that owns most."""
        return sum(b.shard_bytes for b in self.registered)

    @property
    def middle_bytes(self) -> int:
        """Bytes of the shards that replicas share out, kept while nobody writes."""
        split = [b for b in self.buckets if self._is_split(b)]
        return sum(b.chunk_numel * b.gather_dtype.itemsize for b in split)

    @property
    def num_trained(self) -> int:
        """Elements with a gradient of the rank that owns most."""
        return sum(r.largest_numel for r in self._last_reduces)

    @property
    def _last_reduces(self) -> list[ReduceLayout]:
        """The stage that delivers."""
        pairs = zip(self.reduces, self.registered, strict=True)
        return [r if home is r.bucket else home_reduce(home, r) for r, home in pairs]

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered copy; zero where the shard is the whole and needs no cast."""
        return sum(b.full_bytes for b in self.buckets if b.world > 1 or b.needs_cast)

    @property
    def grad_bytes(self) -> int:
        """Bytes of the sharded gradients of the rank that owns most."""
        return sum(r.largest_numel * r.bucket.grad_dtype.itemsize for r in self._last_reduces)

    @property
    def feedback_bytes(self) -> int:
        """Bytes of what rounding gradients lost, kept for the next ones."""
        total = 0
        for reduce in self.reduces:
            total += _feedback_of(reduce)
            if self._is_split(reduce.bucket):
                total += _feedback_of(home_reduce(home_layout(reduce.bucket, 0), reduce))
            elif reduce.bucket.wire.replicate.feeds_back and reduce.bucket.replicas > 1:
                total += _FLOAT32 * (reduce.counts_offset + reduce.replica_parts[0])
        return total

    @property
    def refreshes(self) -> tuple[Collective, ...]:
        """What the first micro-batch behind a write issues more."""
        homes = [home_layout(b, 0) for b in self.buckets if self._is_split(b) and b.full_numel]
        moment = Moment.FORWARD
        return tuple(Collective("gather", "replicate", moment, h.sent_bytes) for h in homes)

    def collectives(self, *, root: bool = False, sync: bool = True) -> tuple[Collective, ...]:
        """What one micro-batch issues, in order; the copy of a `root` under `USE` lives on."""
        out: list[Collective] = []
        for bucket in self.buckets:
            if bucket.world > 1 and bucket.full_numel:
                out += gather_of(bucket, Moment.FORWARD)
                if self.strategy.lifetime is Lifetime.USE and not root:
                    out += gather_of(bucket, Moment.BACKWARD)
        for reduce in self.reduces if sync else ():
            if not reduce.indices:
                continue
            if reduce.world > 1:
                out += reduce_of(reduce)
            if self._is_split(reduce.bucket):
                second = home_reduce(home_layout(reduce.bucket, 0), reduce)
                out.append(Collective("reduce", "replicate", _LAST, second.sent_bytes))
            elif reduce.bucket.replicas > 1:
                out += all_reduce_of(reduce)
        return tuple(out)


_LAST = Moment.POST_BACKWARD
_FLOAT32 = 4  # bytes


def _feedback_of(reduce: ReduceLayout) -> int:
    """Of a reduction over a shard axis: a float32 for each element that is rounded."""
    wire = reduce.bucket.wire.shard
    if not wire.feeds_back or reduce.world == 1:
        return 0
    if not reduce.sends_padded:
        return _FLOAT32 * sum(reduce.data_numel(rank) for rank in range(reduce.world))
    return _FLOAT32 * reduce.world // (wire.host_ranks or 1) * reduce.counts_offset


def gather_of(bucket: BucketLayout, moment: Moment) -> list[Collective]:
    """What gathers a bucket over the shard axis."""
    size = bucket.sent_bytes
    inside = bucket.wire.shard.host_ranks if bucket.sends_padded else 0
    if not inside:
        return [Collective("gather", "shard", moment, size)]
    hosts = bucket.world // inside
    return [
        Collective("gather", "shard", moment, size, hosts),
        Collective("gather", "shard", moment, size * hosts, inside, is_inside=True),
    ]


def reduce_of(reduce: ReduceLayout) -> list[Collective]:
    """What sums a bucket's gradients over the shard axis."""
    wire = reduce.bucket.wire.shard
    inside = wire.host_ranks if reduce.sends_padded else 0
    if not inside:
        return [Collective("reduce", "shard", _LAST, reduce.sent_bytes)]
    hosts, num = reduce.world // inside, len(reduce.indices)
    piece = wire.reduce.num_bytes(reduce.counts_offset, reduce.dtype.itemsize, num)
    first = reduce.world * reduce.chunk_bytes
    return [
        Collective("reduce", "shard", _LAST, first, inside, is_inside=True),
        Collective("reduce", "shard", _LAST, hosts * piece, hosts),
    ]


def all_reduce_of(reduce: ReduceLayout) -> list[Collective]:
    """What sums them over the replicate axis, where all replicas get the sum."""
    form, itemsize, num = (
        reduce.bucket.wire.replicate.reduce,
        reduce.dtype.itemsize,
        len(reduce.indices),
    )
    if not form.is_lossy:
        return [Collective("all_reduce", "replicate", _LAST, reduce.chunk_bytes)]
    parts = reduce.replica_parts
    sent = sum(form.num_bytes(numel, itemsize, num) for numel in parts)
    return [
        Collective("reduce", "replicate", _LAST, sent),
        Collective("gather", "replicate", _LAST, form.num_bytes(parts[0], itemsize)),
    ]


def layout_unit(
    name: str,
    specs: Sequence[ParamSpec],
    *,
    strategy: Strategy,
    policy: MixedPrecisionPolicy,
    world: int,
    replicas: int = 1,
    on_accelerator: bool = False,
    wire: Wire = Wire(),  # noqa: B008  (frozen)
) -> UnitLayout:
    """Sort parameters into buckets and lay each one out; on an accelerator with padded rows, unless
    the strategy cuts what is gathered once more.
    """
    is_cut_again = strategy.splits_replicas or bool(strategy.forward_world)
    gather = {s.name: s.dtype if s.keeps_dtype else policy.gather_dtype(s.dtype) for s in specs}
    reduce = {s.name: policy.sum_dtype(s.grad_dtype or gather[s.name]) for s in specs}
    rounded = {s.name for s in specs if s.requires_grad} if wire.gather != "exact" else set()

    def laid_out(group: list[ParamSpec]) -> BucketLayout:
        first = group[0].name
        dtypes = gather[first], reduce[first]
        rounds = first in rounded
        return layout_bucket(
            group,
            gather_dtype=gather[first],
            reduce_dtype=reduce[first],
            world=world,
            replicas=replicas,
            pads_rows=on_accelerator and not is_cut_again,
            wire=wire.of_bucket(strategy, *dtypes, rounds=rounds, world=world),
        )

    groups = group_by_dtype(specs, gather, reduce, rounded)
    return UnitLayout(name, strategy, tuple(map(laid_out, groups)))
