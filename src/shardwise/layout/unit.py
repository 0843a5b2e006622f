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


class Moment(StrEnum):
    """When in a step a collective is issued."""

    FORWARD = "forward"
    BACKWARD = "backward"
    POST_BACKWARD = "post_backward"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a step: `size_bytes` is what one rank puts in, at most."""

    kind: str  # "gather" | "reduce" | "all_reduce"
    axis: str  # "shard" | "replicate"
    moment: Moment
    size_bytes: int


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
    def refreshes(self) -> tuple[Collective, ...]:
        """What the first micro-batch behind a write issues more."""
        homes = [home_layout(b, 0) for b in self.buckets if self._is_split(b) and b.full_numel]
        sizes = [h.chunk_numel * h.gather_dtype.itemsize for h in homes]
        return tuple(Collective("gather", "replicate", Moment.FORWARD, size) for size in sizes)

    def collectives(self, *, root: bool = False, sync: bool = True) -> tuple[Collective, ...]:
        """What one micro-batch issues, in order; the copy of a `root` under `USE` lives on."""
        out: list[Collective] = []
        for bucket in self.buckets:
            if bucket.world > 1 and bucket.full_numel:
                size = bucket.chunk_numel * bucket.gather_dtype.itemsize
                out.append(Collective("gather", "shard", Moment.FORWARD, size))
                if self.strategy.lifetime is Lifetime.USE and not root:
                    out.append(Collective("gather", "shard", Moment.BACKWARD, size))
        for reduce in self.reduces if sync else ():
            if not reduce.indices:
                continue
            if reduce.world > 1:
                size = reduce.packed_numel * reduce.dtype.itemsize
                out.append(Collective("reduce", "shard", Moment.POST_BACKWARD, size))
            if self._is_split(reduce.bucket):
                second = home_reduce(home_layout(reduce.bucket, 0), reduce)
                size = second.packed_numel * second.dtype.itemsize
                out.append(Collective("reduce", "replicate", Moment.POST_BACKWARD, size))
            elif reduce.bucket.replicas > 1:
                size = reduce.chunk_bytes
                out.append(Collective("all_reduce", "replicate", Moment.POST_BACKWARD, size))
        return tuple(out)


def layout_unit(
    name: str,
    specs: Sequence[ParamSpec],
    *,
    strategy: Strategy,
    policy: MixedPrecisionPolicy,
    world: int,
    replicas: int = 1,
    on_accelerator: bool = False,
) -> UnitLayout:
    """Sort parameters into buckets and lay each one out; on an accelerator with padded rows, unless
    the strategy cuts what is gathered once more.
    """
    is_cut_again = strategy.splits_replicas or bool(strategy.forward_world)
    gather = {s.name: s.dtype if s.keeps_dtype else policy.gather_dtype(s.dtype) for s in specs}
    reduce = {s.name: policy.sum_dtype(s.grad_dtype or gather[s.name]) for s in specs}
    buckets = tuple(
        layout_bucket(
            group,
            gather_dtype=gather[group[0].name],
            reduce_dtype=reduce[group[0].name],
            world=world,
            replicas=replicas,
            pads_rows=on_accelerator and not is_cut_again,
        )
        for group in group_by_dtype(specs, gather, reduce)
    )
    return UnitLayout(name, strategy, buckets)
