"""The shared-memory transport against c10d:

random gathers and reductions, versions, different orders.
"""

from __future__ import annotations

import functools
import random
import time

import torch
from axes import alone, hybrid_axes, shard_axis

from layouts import fill_shard, gathered, random_bucket, random_whole
from ranks import on_ranks
from shardwise.comm.c10d.transport import C10dTransport
from shardwise.comm.shared_memory import SharedMemoryTransport
from shardwise.comm.shared_memory.reductions import ReplicaSum, ReplicaSumByPieces
from shardwise.comm.transport import Bucket, Position, Transport
from shardwise.layout import ParamSpec, layout_bucket, layout_reduce

CPU = torch.device("cpu")
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def at(step: int, phase: str = "forward", unit: str = "root") -> Position:
    return Position(step, phase, unit)


def transports(rank: int, world: int) -> tuple[SharedMemoryTransport, C10dTransport]:
    axes = shard_axis(rank, world), alone("replicate", rank)
    return SharedMemoryTransport(*axes), C10dTransport(*axes)


def gather(transport: Transport, bucket: Bucket) -> torch.Tensor:
    out = torch.full((bucket.layout.full_numel,), 77.0).to(bucket.layout.gather_dtype)
    transport.gather(bucket, bucket.buffer, out).wait()
    return out


@on_ranks(2, 3, 4)
def test_random_gathers_equal_c10d(rank: int, world: int) -> None:
    shared, c10d = transports(rank, world)
    rng = random.Random(3)
    stored = (F32, BF16, F16, F64, torch.float8_e4m3fn, torch.int16, torch.uint8, torch.bool)
    for trial in range(300):
        dtype = rng.choice(stored)
        cast = rng.choice((None, F32, BF16)) if dtype.is_floating_point else None
        layout = random_bucket(rng, world, dtype=dtype, gather_dtype=cast)
        bucket, other = (t.attach(f"unit[{trial}]", layout, CPU) for t in (shared, c10d))
        whole = random_whole(layout, trial)
        for b in (bucket, other):
            fill_shard(b.buffer, layout, whole, rank)
        shared.enter(at(trial))
        found = gathered(gather(shared, bucket), layout)
        shared.leave(at(trial))
        expected = gathered(gather(c10d, other), layout)
        for f, e, w in zip(found, expected, whole, strict=True):
            assert torch.equal(f, e)
            assert torch.equal(f, w.to(layout.gather_dtype))


@on_ranks(2, 3, 4)
def test_random_reductions_equal_c10d(rank: int, world: int) -> None:
    """Small integers: sums are exact in any order and dtype, so c10d's bits are the oracle."""
    shared, c10d = transports(rank, world)
    rng, own = random.Random(5), random.Random(100 + rank)
    for trial in range(300):
        reduce_dtype = rng.choice((F32, F32, F64, BF16, F16))
        layout = random_bucket(rng, world, reduce_dtype=reduce_dtype)
        reduce = layout_reduce(layout)
        pre_scale, scale = rng.choice((1.0, 0.5)), rng.choice((1.0, 0.25))
        arrivals = []
        for i in reduce.indices:
            for _ in range(own.choice((0, 1, 1, 1, 2))):
                grad = random_whole(layout, own.randrange(10**6))[i]
                grad = grad.to(own.choice((F32, BF16)))
                if grad.dim() > 1 and own.random() < 0.3:
                    grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
                arrivals.append((reduce.indices.index(i), grad))
        own.shuffle(arrivals)
        results = []
        for t in (shared, c10d):
            bucket = t.attach(f"unit[{trial}]", layout, CPU)
            t.enter(at(trial, "backward"))
            out = torch.full((reduce.chunk_numel,), 77.0, dtype=reduce.dtype)
            grads = t.grad_buffer(bucket, reduce, out, pre_scale)
            for index, grad in arrivals:
                grads.put(index, grad)
            t.reduce(bucket, grads, out, scale).wait()
            t.leave(at(trial, "backward"))
            results.append(out)
        found, expected = results
        n = reduce.counts_offset
        assert torch.equal(found[:n], expected[:n]), (trial, layout)
        assert torch.equal(found[n:], expected[n:] / scale), (found[n:], expected[n:])


@on_ranks(4)
def test_hybrid_reductions_equal_c10d(rank: int, world: int) -> None:
    for size in ((2, 2), (1, 4)):
        axes = hybrid_axes(rank, *size)
        shared, c10d = SharedMemoryTransport(*axes), C10dTransport(*axes)
        rng = random.Random(9)
        for trial in range(100):
            layout = random_bucket(rng, size[0], replicas=size[1])
            reduce = layout_reduce(layout)
            results = []
            for t in (shared, c10d):
                bucket = t.attach(f"unit[{trial}]", layout, CPU)
                t.enter(at(trial, "backward"))
                out = torch.full((reduce.chunk_numel,), 77.0, dtype=reduce.dtype)
                grads = t.grad_buffer(bucket, reduce, out)
                for i, index in enumerate(reduce.indices):
                    if (trial + i + rank) % 3:
                        grads.put(i, random_whole(layout, trial * world + rank)[index])
                t.reduce(bucket, grads, out, 0.5).wait()
                t.all_reduce(bucket, out).wait()
                t.leave(at(trial, "backward"))
                results.append(out)
            found, expected = results
            n = reduce.counts_offset
            assert torch.equal(found[:n], expected[:n]), (trial, layout)
            assert torch.equal(found[n:], expected[n:] * 2)


@on_ranks(2, 3, 4)
def test_both_kinds_of_all_reduce_give_all_replicas_the_same_bits(rank: int, world: int) -> None:
    axes = alone("shard", rank), shard_axis(rank, world)
    shared = SharedMemoryTransport(*axes)
    for trial, numel in enumerate((1, 15, 16 * world, 1000, 70_001)):
        spec = ParamSpec("w", (numel,), F32)
        layout = layout_bucket([spec], gather_dtype=F32, reduce_dtype=F32, world=1, replicas=world)
        bucket = shared.attach(f"unit[{trial}]", layout, CPU)
        parts = [
            torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(world)
        ]
        expected = functools.reduce(torch.add, parts)
        shared.enter(at(trial))
        for kind in (ReplicaSum, ReplicaSumByPieces):
            out = parts[rank].clone()
            kind(shared._mail, bucket, out).wait()
            assert torch.equal(out, expected)
        shared.leave(at(trial))


@on_ranks(2, 3, 4)
def test_flags(rank: int, world: int) -> None:
    shared, _ = transports(rank, world)
    for step in range(20):
        shared.enter(at(step))
        assert shared.agree([]) == []
        for count in (1, 5, 2048, 5000):
            flags = [(i + step) % (world + 3) == rank for i in range(count)]
            expected = [(i + step) % (world + 3) < world for i in range(count)]
            assert shared.agree(flags) == expected
        shared.leave(at(step))


def pause(rng: random.Random) -> None:
    """Now and then a delay:

    most are shorter than the polls last, some let the peers fall asleep.
    """
    if rng.random() < 0.3:
        time.sleep(rng.choice((0.0, 0.0001, 0.002)))


class Writer:
    """Buckets whose shards all hold one number, the version; every write makes the next version."""

    def __init__(self, transport: SharedMemoryTransport, rng: random.Random, rank: int, world: int):
        self.transport, self.rank, self.version = transport, rank, 0
        self.layouts = [random_bucket(rng, world) for _ in range(5)]
        self.buckets = [transport.attach(f"u[{i}]", x, CPU) for i, x in enumerate(self.layouts)]
        self.outs = [torch.empty(x.full_numel) for x in self.layouts]
        self.write()

    def write(self) -> None:
        """In place, as an optimizer does, at once for all buckets."""
        self.version += 1
        for bucket in self.buckets:
            bucket.buffer.fill_(self.version)

    def gather_and_check(self, index: int) -> None:
        bucket, out = self.buckets[index], self.outs[index]
        out.untyped_storage().resize_(out.numel() * out.itemsize)
        self.transport.gather(bucket, bucket.buffer, out).wait()
        for tensor in gathered(out, bucket.layout):
            assert (tensor == self.version).all(), (tensor.unique(), self.version)
        out.untyped_storage().resize_(0)


@on_ranks(2, 3, 4)
def test_every_gather_sees_one_version(rank: int, world: int) -> None:
    """Thousands of gathers and reductions with delays, and a write straight after engine calls.

    Some ranks leave buckets out of the reduction, and each has its own order.
    """
    shared, _ = transports(rank, world)
    same, own = random.Random(17), random.Random(50 + rank)
    writer = Writer(shared, same, rank, world)
    reduces = [layout_reduce(layout) for layout in writer.layouts]
    trainable, num_slots = [i for i, layout in enumerate(reduces) if layout.indices], 0
    for step in range(250):
        training = same.random() < 0.7
        shared.enter(at(step))
        for index in range(len(writer.buckets)):
            pause(own)
            writer.gather_and_check(index)
        shared.leave(at(step))
        if same.random() < 0.5:
            writer.write()
        if not training:
            continue
        pause(own)
        shared.enter(at(step, "backward"))
        used = [same.sample(trainable, same.randint(0, len(trainable))) for _ in range(world)]
        own.shuffle(used[rank])
        handles = []
        for index in used[rank]:
            pause(own)
            writer.gather_and_check(index)
            handles.append(reduced(shared, writer, reduces, index, float(rank + step)))
        while missing := shared.missing(at(step, "backward")):
            for one in missing:
                index = next(i for i, b in enumerate(writer.buckets) if b is one.bucket)
                assert index not in used[rank]
                handles.append(reduced(shared, writer, reduces, index, None))
        for handle, _, _ in handles:
            handle.wait()
        shared.leave(at(step, "backward"))
        assert sorted(i for _, i, _ in handles) == sorted({i for some in used for i in some})
        for _, index, out in handles:
            ranks = [r for r in range(world) if index in used[r]]
            data, counts = out.split(
                [reduces[index].counts_offset, out.numel() - reduces[index].counts_offset]
            )
            n = reduces[index].data_numel(rank)
            assert (data[:n] == sum(r + step for r in ranks)).all()
            assert (counts == len(ranks)).all()
        if same.random() < 0.8:
            writer.write()
        if step <= 150:
            num_slots = len(shared._mail.pool.slots)
    # Orders change all the time here, so the pool may have grown: never beyond what one phase
    # needs.
    assert len(shared._mail.pool.slots) <= max(num_slots, 5)


def reduced(shared, writer: Writer, reduces, index: int, value: float | None):
    """Reduce a bucket whose gradients are all `value`, None: of which this rank has none."""
    bucket, layout = writer.buckets[index], reduces[index]
    out = torch.full((layout.chunk_numel,), 77.0)
    grads = shared.grad_buffer(bucket, layout, out)
    if value is not None:
        for i, param in enumerate(layout.params):
            grads.put(i, torch.full(param.spec.shape, value))
    return shared.reduce(bucket, grads, out, 1.0), index, out
