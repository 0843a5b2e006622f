"""1 GB of safetensors onto 2 ranks and out again: bytes, seconds, and the peak memory of each rank.

    python benchmarks/checkpoint_io.py [--out FILE.json] [--gigabytes 1] [--ranks 2]

Each rank builds the model on the meta device, shards it, loads and saves, while a thread samples
its PSS (proportional set size: shared pages count once in all). "growth" is the peak above what the
rank held before the load. The limits: 0.55 GB + 200 MiB for a rank's growth, byte-equal export.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn

import shardwise
from shardwise.bench.machine import describe
from shardwise.cli import main as command

ROWS, COLUMNS = 4096, 4096  # 64 MiB in fp32


class Stack(nn.Module):
    """Matrices, each a unit."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(count))


class PeakPss:
    """Samples this process every 50 ms."""

    def __init__(self) -> None:
        self.peak = self.start = pss_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.peak = max(self.peak, pss_bytes())

    def __enter__(self) -> PeakPss:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, pss_bytes())


def pss_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no Pss in smaps_rollup")


def rank_main(rank: int, world: int, folder: str, count: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29761", RANK=str(rank))
    os.environ["WORLD_SIZE"] = str(world)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    path, report = Path(folder), {}

    def measured(name: str, action: Any) -> None:
        dist.barrier()
        with PeakPss() as memory:
            started = time.perf_counter()
            action()
            elapsed = time.perf_counter() - started
        report[name] = {
            "seconds": elapsed,
            "before_bytes": memory.start,
            "growth_bytes": memory.peak - memory.start,
        }

    with torch.device("meta"):
        model = Stack(count)
    shardwise.shard_model(model, unit=["Linear"])
    measured("load_pretrained", lambda: shardwise.load_pretrained(model, path / "in"))
    manager = shardwise.CheckpointManager(path / "checkpoints")
    measured("save", lambda: manager.save(1, model))
    measured("load", lambda: manager.load(manager.latest()[0], model))
    measured("save_pretrained", lambda: shardwise.save_pretrained(model, path / "out"))
    (path / f"rank{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def write_input(path: Path, count: int) -> None:
    path.mkdir()
    torch.manual_seed(0)
    state = {f"layers.{i}.weight": torch.randn(ROWS, COLUMNS) for i in range(count)}
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    count = max(1, round(options.gigabytes * 1e9 / (ROWS * COLUMNS * 4)))
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_io_"))
    try:
        write_input(folder / "in", count)
        size = (folder / "in/model.safetensors").stat().st_size
        mp.spawn(rank_main, (options.ranks, str(folder), count), nprocs=options.ranks)
        checkpoint = folder / "checkpoints/step_00000001"
        with PeakPss() as memory:
            started = time.perf_counter()
            assert command(["checkpoint", "export", str(checkpoint), str(folder / "cli")]) == 0
            elapsed = time.perf_counter() - started
        original = (folder / "in/model.safetensors").read_bytes()
        equal = {
            name: (folder / name / "model.safetensors").read_bytes() == original
            for name in ("out", "cli")
        }
        ranks = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(options.ranks)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    limit = int(0.55 * size + 200 * 2**20) if options.ranks == 2 else None
    peaks = [r["load_pretrained"]["growth_bytes"] for r in ranks]
    result = {
        "machine": describe(),
        "model_bytes": size,
        "ranks": ranks,
        "export": {"seconds": elapsed, "growth_bytes": memory.peak - memory.start},
        "byte_equal": equal,
        "limit_bytes": limit,
        "holds": all(equal.values()) and (limit is None or max(peaks) < limit),
    }
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
