"""A copy in memory beside a checkpoint on disk of the same state: seconds and bytes, out and in.

    python benchmarks/memory_copies.py [--out FILE.json] [--megabytes 800] [--rounds 5]

2 ranks, matrices under AdamW (fp32: three numbers a parameter). A round saves and reads on disk, in
memory as one host, and in memory as two hosts, which are two folders here: the wire between them is
this machine's loopback. Reading includes the check of all blocks, as a restart does it; one read of
two hosts follows the loss of one of them. Files on disk were just written, so reading finds them
in the page cache: a real restart from disk may take longer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import shardwise
from shardwise.bench.machine import describe
from shardwise.checkpoint.memory import MemoryCopies
from shardwise.checkpoint.ranks import Ranks

WIDTH, RANKS = 2048, 2  # 16 MiB a matrix in fp32, 48 with its optimizer state


def rank_main(rank: int, disk: str, memory: str, count: int, rounds: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29763", RANK=str(rank))
    os.environ["WORLD_SIZE"] = str(RANKS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    shardwise.shard_model(model, unit=["Linear"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    one = MemoryCopies(_folder(memory, "one"), Ranks(), owner="benchmark")
    two = MemoryCopies(_folder(memory, f"two{rank}"), Ranks(), owner="benchmark")
    manager = shardwise.CheckpointManager(disk, keep=1)
    for copies in (one, two):
        copies.claim()
    seconds: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        dist.barrier()
        started = time.perf_counter()
        action()
        dist.barrier()
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    def read(copies: MemoryCopies) -> None:
        found, notes = copies.latest()
        assert found is not None, notes
        copies.bring(found, model)
        manager.load(found, model, optimizer)

    for step in range(1, rounds + 1):
        timed("save disk", lambda: manager.save(step, model, optimizer))  # noqa: B023
        timed("save memory, one host", lambda: one.save(step, model, optimizer))  # noqa: B023
        timed("save memory, two hosts", lambda: two.save(step, model, optimizer))  # noqa: B023
        timed("read disk", lambda: manager.load(manager.latest()[0], model, optimizer))
        timed("read memory, one host", lambda: read(one))
        if rank == 1:
            shutil.rmtree(two.folder)
        timed("read memory, two hosts, one lost", lambda: read(two))
        two.claim()
    held = {"disk": _bytes(Path(disk)), "one host": _bytes(one.folder)}
    two.save(rounds + 1, model, optimizer)
    held["each of two hosts"] = _bytes(two.folder)
    if rank == 0:
        Path(disk, "report.json").write_text(json.dumps({"seconds": seconds, "bytes": held}))
    dist.destroy_process_group()


def _folder(memory: str, host: str) -> Path:
    path = Path(memory, host)
    path.mkdir(exist_ok=True)
    return path / "run"


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--megabytes", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    count = max(2, round(options.megabytes * 1e6 / (WIDTH * WIDTH * 12)))
    disk = Path(tempfile.mkdtemp(prefix="memory_copies_"))
    memory = Path(tempfile.mkdtemp(prefix="memory_copies_", dir="/dev/shm"))
    try:
        mp.spawn(rank_main, (str(disk), str(memory), count, options.rounds), nprocs=RANKS)
        found = json.loads((disk / "report.json").read_text())
    finally:
        for folder in (disk, memory):
            shutil.rmtree(folder, ignore_errors=True)
    summary = {
        name: {"median": statistics.median(times), "least": min(times), "most": max(times)}
        for name, times in found["seconds"].items()
    }
    result = {"machine": describe(), "bytes": found["bytes"], "seconds": summary}
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
