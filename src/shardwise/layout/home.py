"""Layouts of a bucket whose shards are cut once more, over the replicate axis.

    home buffer     | w1[s][r] | w2[s][r] | ..pad |   stored dtype, registered
    middle buffer   | w1[s] ..pad | w2[s] ..pad   |   gather dtype, kept while nobody writes
    gathered        | w1 ..pad | w2 ..pad         |   gather dtype, for one use

To its replicate axis a rank's shard is what a whole bucket is to the shard axis: parameters whose
rows are these, packed by the same rule, so what gathers the home buffers writes the middle one.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.layout.bucket import BucketLayout, layout_bucket
from shardwise.layout.reduce import ReduceLayout
from shardwise.layout.wire import BucketWire


def middle_layout(bucket: BucketLayout) -> BucketLayout:
    """The same parts in the gather dtype: what waits between uses is cast already."""
    dtype = bucket.gather_dtype
    params = tuple(replace(p, spec=replace(p.spec, dtype=dtype)) for p in bucket.params)
    return replace(bucket, params=params, dtype=dtype)


def home_layout(bucket: BucketLayout, rank: int) -> BucketLayout:
    """The shard of `rank` as a bucket that its replicas share; its gathered buffer is the shard
    buffer of `middle_layout`.
    """
    specs = [replace(p.spec, shape=p.shard_shape(rank), cuts=None) for p in bucket.params]
    return layout_bucket(
        specs,
        gather_dtype=bucket.gather_dtype,
        reduce_dtype=bucket.reduce_dtype,
        world=bucket.replicas,
        wire=BucketWire(shard=bucket.wire.replicate),
    )  # gathered to `rank`'s shard of `bucket`


def home_reduce(home: BucketLayout, first: ReduceLayout) -> ReduceLayout:
    """The second stage of a reduction: of the same parameters, among the replicas."""
    return ReduceLayout(home, first.indices)
