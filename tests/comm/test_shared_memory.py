"""The shared-memory transport against c10d: random gathers and reductions, versions, different orders."""

from __future__ import annotations

import random
import time

import torch
from axes import alone, hybrid_axes, shard_axis
from layouts import fill_shard, gathered, random_bucket, random_whole
from ranks import on_ranks

from shardwise.comm.c10d import C10dTransport
from shardwise.comm.shared_memory import SharedMemoryTransport
from shardwise.comm.transport import Bucket, Position, Transport
from shardwise.layout import layout_reduce

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
    """Now and then a delay: most are shorter than the polls last, some let the peers fall asleep."""
    if rng.random() < 0.3:
        time.sleep(rng.choice((0.0, 0.0001, 0.002)))
