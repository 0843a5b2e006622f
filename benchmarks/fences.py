"""What the shared-memory transport costs, beside Gloo: fences, gathers, reductions, all-reduces.

    python benchmarks/fences.py [--ranks 2 4] [--mib 28] [--repeat 20]

Prints one line for each number of ranks and operation: microseconds (fences) or milliseconds
(movements of `--mib` MiB of fp32 parameters in four tensors), median and best, as seen by the
slowest rank. Pages are warm: every operation has run once before it is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwise.comm.c10d.transport import C10dTransport
from shardwise.comm.shared_memory import SharedMemoryTransport
from shardwise.comm.transport import Axis, Position, Transport
from shardwise.layout import ParamSpec, layout_bucket, layout_reduce

HERE = Position(0, "backward", "benchmark")
CPU = torch.device("cpu")


Seconds = tuple[float, float]  # median and best over the repetitions


def slowest(seconds: list[float]) -> Seconds:
    """The slowest rank's median, and its best."""
    ranks: list[Seconds] = [(0.0, 0.0)] * dist.get_world_size()
    dist.all_gather_object(ranks, (statistics.median(seconds), min(seconds)))
    return max(median for median, _ in ranks), max(best for _, best in ranks)


def timed(body: Callable[[], None], repeat: int, per: int = 1) -> Seconds:
    """Seconds of one of the `per` operations in `body`."""
    body()
    seconds = []
    for _ in range(repeat):
        dist.barrier()
        started = time.perf_counter()
        body()
        seconds.append((time.perf_counter() - started) / per)
    return slowest(seconds)


def fences(shared: SharedMemoryTransport, rounds: int = 100) -> dict[str, Seconds]:
    """One phase, the same with an agreement, and Gloo's barrier."""

    def many(step: Callable[[], None]) -> Seconds:
        def body() -> None:
            for _ in range(rounds):
                step()

        return timed(body, 9, rounds)

    def phase() -> None:
        shared.enter(HERE)
        shared.leave(HERE)

    def agree() -> None:
        shared.enter(HERE)
        shared.agree([True] * 50)
        shared.leave(HERE)

    return {
        "phase: both fences": many(phase),
        "phase that agrees on 50 flags": many(agree),
        "gloo barrier": many(dist.barrier),
    }


def movements(
    transport: Transport, sharded: Transport, world: int, numel: int, repeat: int
) -> dict[str, Seconds]:
    """Seconds per movement;

    `transport` has the ranks on the replicate axis, `sharded` on the shard axis.
    """
    results = {}
    for name, gather_dtype in (("gather", torch.float32), ("gather to bf16", torch.bfloat16)):
        layout = layout_of(numel, world, gather_dtype)
        bucket = sharded.attach(name, layout, CPU)
        bucket.buffer.fill_(1.0)
        out = torch.empty(layout.full_numel, dtype=gather_dtype)
        results[name] = phases(
            sharded, lambda b=bucket, o=out: sharded.gather(b, b.buffer, o).wait(), repeat
        )
    layout = layout_of(numel, world, torch.float32)
    for name, dtype in (("reduce", torch.float32), ("reduce of bf16", torch.bfloat16)):
        bucket, reduce = sharded.attach(name, layout, CPU), layout_reduce(layout)
        grads = [torch.ones(p.spec.shape, dtype=dtype) for p in layout.params]
        out = torch.empty(reduce.chunk_numel)

        def body(b=bucket, r=reduce, o=out, gs=grads) -> None:
            buffer = sharded.grad_buffer(b, r, o)
            for index, grad in enumerate(gs):
                buffer.put(index, grad)
            sharded.reduce(b, buffer, o, 0.5).wait()

        results[name] = phases(sharded, body, repeat)
    bucket = transport.attach("all_reduce", layout_of(numel, 1, torch.float32), CPU)
    whole = torch.ones(numel)
    results["all_reduce"] = phases(
        transport, lambda: transport.all_reduce(bucket, whole).wait(), repeat
    )
    return results


def phases(transport: Transport, body: Callable[[], None], repeat: int) -> Seconds:
    def step() -> None:
        transport.enter(HERE)
        body()
        transport.leave(HERE)

    return timed(step, repeat)


def layout_of(numel: int, world: int, gather_dtype: torch.dtype):
    specs = [ParamSpec(f"w{i}", (64, numel // 256), torch.float32) for i in range(4)]
    return layout_bucket(specs, gather_dtype=gather_dtype, reduce_dtype=torch.float32, world=world)


def of(seconds: Seconds, unit: float) -> str:
    return f"{seconds[0] * unit:8.1f} (best {seconds[1] * unit:8.1f})"


def run(rank: int, world: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    every = tuple(range(world))
    shard = Axis("shard", every, rank, dist.group.WORLD), Axis("replicate", (rank,), 0, None)
    whole = Axis("shard", (rank,), 0, None), Axis("replicate", every, rank, dist.group.WORLD)
    lines = [
        f"{world} ranks  {name:32} {of(seconds, 1e6)} us"
        for name, seconds in fences(SharedMemoryTransport(*shard)).items()
    ]
    numel = options.mib * 2**20 // 4
    ours, gloo = (
        movements(kind(*whole), kind(*shard), world, numel, options.repeat)
        for kind in (SharedMemoryTransport, C10dTransport)
    )
    lines += [
        f"{world} ranks  {f'{name}, {options.mib} MiB':32} {of(ours[name], 1e3)} ms   "
        f"gloo {of(gloo[name], 1e3)} ms"
        for name in ours
    ]
    if rank == 0:
        print("\n".join(lines), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, default=28)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    for world in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, args=(world, f"{folder}/store", options), nprocs=world)


if __name__ == "__main__":
    main()
