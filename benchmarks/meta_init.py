"""Peak memory of meta init: a 0.5B decoder on 2 ranks, made without ever holding the whole model.

    python benchmarks/meta_init.py [--ranks 2] [--json PATH]

Each rank builds the decoder on the meta device, shards it (`shard_model`) and fills it unit by
unit (`materialize`). Its peak PSS, sampled from outside from before the build to the end, must stay
below 60% of the full model's bytes plus 300 MiB. The last line of the output is the result as JSON;
the exit code is 1 when a rank needs more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.bench import machine
from shardwise.bench.memory import PssSampler
from shardwise.bench.workload import SEED
from shardwise.bench.workload import DecoderWorkload as Workload

WORKLOADS = {
    "0.5B": Workload("0.5B", layers=16, dim=1536, heads=12, num_tokens=256, vocab_size=16_384),
    "tiny": Workload("tiny", layers=2, dim=64, heads=2, num_tokens=32, vocab_size=256),
}
ALLOWED_SHARE = 0.6
ALLOWED_EXTRA_BYTES = 300 * 2**20


def run_rank(
    rank: int, num_ranks: int, workload: Workload, transport: str, rendezvous: str, pipe: Connection
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from shardwise import materialize, shard_model
    from shardwise.train.decoder import Decoder

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks
    )
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("shard",))
    pipe.send("ready")
    pipe.recv()
    started_s = time.perf_counter()
    with torch.device("meta"):
        model = Decoder(workload.config, workload.num_tokens)
    shard_model(model, mesh=mesh, transport=transport)
    materialize(model, seed=SEED)
    elapsed_s = time.perf_counter() - started_s
    held = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    pipe.send({"elapsed_s": elapsed_s, "shard_bytes": held})
    pipe.recv()
    dist.destroy_process_group()


def measure(workload: Workload, num_ranks: int, transport: str) -> dict[str, Any]:
    """Peak PSS of each rank, beside what is allowed."""
    context = multiprocessing.get_context("spawn")
    full_bytes = 4 * workload.num_params
    allowed_bytes = int(ALLOWED_SHARE * full_bytes) + ALLOWED_EXTRA_BYTES
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            args = (rank, num_ranks, workload, transport, str(Path(folder) / "meet"), theirs)
            process = context.Process(target=run_rank, args=args, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        pids = [process.pid for process in processes]
        with PssSampler(pids) as sampler:
            for pipe in pipes:
                pipe.send("go")
            answers = [pipe.recv() for pipe in pipes]
            num_samples = sampler.num_samples
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join(timeout=30)
    ranks = [
        {
            "rank": rank,
            "peak_pss_bytes": sampler.peak_of[pid].total,
            "allowed_bytes": allowed_bytes,
            "within": sampler.peak_of[pid].total <= allowed_bytes,
            **answer,
        }
        for rank, (pid, answer) in enumerate(zip(pids, answers, strict=True))
    ]
    return {
        "benchmark": "meta_init",
        **machine.describe(),
        "num_params": workload.num_params,
        "full_model_bytes": full_bytes,
        "transport": transport,
        "num_samples": num_samples,
        "ranks": ranks,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workload", choices=WORKLOADS, default="0.5B")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--json", metavar="PATH", help="write the JSON line there too")
    args = parser.parse_args(argv)
    result = measure(WORKLOADS[args.workload], args.ranks, args.transport)
    table = Table(
        title=f"meta init, {result['num_params'] / 1e6:.0f}M parameters, full model "
        f"{result['full_model_bytes'] / 2**20:,.0f} MiB"
    )
    for name in ("rank", "peak PSS MiB", "allowed MiB", "own shards MiB", "seconds", ""):
        table.add_column(name, justify="right")
    for rank in result["ranks"]:
        table.add_row(
            str(rank["rank"]),
            f"{rank['peak_pss_bytes'] / 2**20:,.0f}",
            f"{rank['allowed_bytes'] / 2**20:,.0f}",
            f"{rank['shard_bytes'] / 2**20:,.0f}",
            f"{rank['elapsed_s']:.1f}",
            "ok" if rank["within"] else "TOO MUCH",
        )
    Console(width=100).print(table)
    line = json.dumps(result)
    if args.json:
        Path(args.json).write_text(line + "\n")
    print(line)
    return 0 if all(rank["within"] for rank in result["ranks"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
