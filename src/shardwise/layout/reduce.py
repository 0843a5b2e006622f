"""Layout of a reduction: where every trainable gradient lies in what the ranks exchange.

    chunk for rank r   | w1[r] | w2[r] | b[r] | ..pad | n_w1 n_w2 n_b |   reduce dtype
                                                      '- one per parameter: ranks with a gradient

Only trainable parameters are in it, packed without gaps, so frozen parameters cost nothing; it is
rebuilt when a `requires_grad` changes. All chunks have the size of the largest (`chunk_numel`), in
multiples of 16 bytes, which collectives on accelerators move fastest. The counts ride at the end of
the chunk at the same place for every rank; only "zero or not" is read from them, which a sum of
ones keeps exact in any dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from shardwise.layout.bucket import BucketLayout, ParamLayout, pack_parts, padding_pays

CHUNK_BYTES = 16  # a chunk is a multiple of it


@dataclass(frozen=True)
class ReduceLayout:
    """The trainable part of a bucket; `indices` are positions in `bucket.params`."""

    bucket: BucketLayout
    indices: tuple[int, ...]

    @cached_property
    def params(self) -> tuple[ParamLayout, ...]:
        return tuple(self.bucket.params[i] for i in self.indices)

    @cached_property
    def members(self) -> str:
        """Which parameters it is about, in words; "" where it is the whole bucket."""
        is_whole = len(self.indices) == len(self.bucket.params)
        return "" if is_whole else ", ".join(p.spec.name for p in self.params)

    @cached_property
    def world(self) -> int:
        return self.bucket.world

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.bucket.reduce_dtype

    def offsets(self, rank: int) -> tuple[int, ...]:
        """Offset of every trainable parameter in the chunk of `rank`."""
        return self._packings[rank][0]

    def data_numel(self, rank: int) -> int:
        """Gradient elements that `rank` receives."""
        return self._packings[rank][1]

    @cached_property
    def _packings(self) -> list[tuple[tuple[int, ...], int]]:
        """For every rank the offsets of its parts, and where they end: no gaps."""
        return pack_parts(self.params, self.world, lambda at, _: at)

    @cached_property
    def largest_numel(self) -> int:
        """`data_numel` of the rank that receives most."""
        return max(end for _, end in self._packings)

    @cached_property
    def counts_offset(self) -> int:
        """Where the counts start in every chunk: they end where it does."""
        num, unit = len(self.indices), max(CHUNK_BYTES // self.dtype.itemsize, 1)
        return -(-(self.largest_numel + num) // unit) * unit - num

    @cached_property
    def chunk_numel(self) -> int:
        return self.counts_offset + len(self.indices)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_numel * self.dtype.itemsize

    @cached_property
    def sends_padded(self) -> bool:
        """True when one padded reduce-scatter is preferred over a reduce of each exact chunk."""
        padded = self.world * self.chunk_numel
        return self.world == 1 or padding_pays(padded, self._exact_numel, self.dtype)

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that every rank puts into the reduction over the shard axis."""
        wire, itemsize, num = self.bucket.wire.shard, self.dtype.itemsize, len(self.indices)
        if not wire.reduce.is_lossy:
            return self.packed_numel * itemsize
        if self.sends_padded:
            return self.world * wire.reduce.num_bytes(self.counts_offset, itemsize, num)
        sizes = [self.data_numel(rank) for rank in range(self.world)]
        return sum(wire.reduce.num_bytes(numel, itemsize, num) for numel in sizes)

    @cached_property
    def replica_parts(self) -> tuple[int, ...]:
        """Elements of a chunk that each replica adds up for all, where they travel rounded."""
        replicas, unit = self.bucket.replicas, CHUNK_BYTES
        size = -(-self.counts_offset // (replicas * unit)) * unit
        starts = [min(r * size, self.counts_offset) for r in range(replicas + 1)]
        return tuple(stop - start for start, stop in pairwise(starts))

    @property
    def packed_numel(self) -> int:
        """Elements that every rank puts in: all ranks' chunks, padded or exact."""
        return self.world * self.chunk_numel if self.sends_padded else self._exact_numel

    @cached_property
    def is_regular(self) -> bool:
        """One call packs all gradients: every parameter is cut along its first dim into parts of
        equal space.
        """
        by_rows = all(p.spec.shape and p.spec.shard_dim == 0 for p in self.params)
        return by_rows and all(p.is_regular and p.numel for p in self.params)

    @cached_property
    def _exact_numel(self) -> int:
        return sum(end for _, end in self._packings) + self.world * len(self.indices)


def layout_reduce(bucket: BucketLayout, trainable: tuple[bool, ...] | None = None) -> ReduceLayout:
    """The reduction of a bucket; `trainable` overrides the specs' own `requires_grad`."""
    flags = trainable or tuple(p.spec.requires_grad for p in bucket.params)
    return ReduceLayout(bucket, tuple(i for i, flag in enumerate(flags) if flag))
