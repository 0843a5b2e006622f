"""What does an optimizer's state in files save in memory, and cost in time; are the bits the same?

    python benchmarks/offload_state.py [--millions 400] [--ranks 2] [--steps 5] [--rounds 2]
                                       [--directory DIR] [--chunk 16MiB] [--json FILE]

Each rank trains a stack of blocks with AdamW under `full_shard`, gradients clipped, with the state
in memory, on the host (`cpu`, on these ranks the same memory) and in files (`nvme`): new processes
for each, in turn, `--rounds` times. A rank's memory is the peak of its PSS, sampled, and the peak
that the kernel kept (VmHWM); the page cache is in neither. Times are the fastest of all steps but
the first of all rounds: `step` is forward, backward, clipping and step, `optimizer` its part in
`optimizer.step()`. What is promised: at least 85% of the state's bytes are saved in every round,
weights and norms are equal to the last bit. Exit code 1 if not. The last line is the result as
JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import shardwise
from checkpoint_io import PeakPss
from shardwise.bench.machine import describe
from shardwise.units import parse_size

PLACES = ("memory", "cpu", "nvme")
SAVED_SHARE = 0.85
WIDTH, HIDDEN, TOKENS = 2048, 8192, 64
PER_BLOCK = 2 * WIDTH * HIDDEN + WIDTH + HIDDEN


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def optimizer_of(model: nn.Module, options: dict[str, Any]) -> Any:
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if options["place"] == "memory":
        return plain
    directory = options["directory"] if options["place"] == "nvme" else None
    return shardwise.OffloadedOptimizer(
        plain, state=options["place"], directory=directory, chunk_bytes=options["chunk_bytes"]
    )


def rank_main(rank: int, options: dict[str, Any]) -> None:
    world, blocks = options["ranks"], options["blocks"]
    torch.set_num_threads(1)
    store = dist.FileStore(options["store"], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    with PeakPss() as memory:
        with torch.device("meta"):
            model = nn.Sequential(*(Block(WIDTH, options["hidden"]) for _ in range(blocks)))
        shardwise.shard_model(model, unit=["Block"])
        torch.manual_seed(0)
        shardwise.materialize(model)
        optimizer = optimizer_of(model, options)
        steps = [one_step(model, optimizer, rank, step) for step in range(options["steps"])]
        weights = hashlib.sha256()
        for parameter in model.parameters():
            weights.update(parameter.to_local().detach().contiguous().numpy().data)  # type: ignore[attr-defined]
        num_local = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    report = {
        "norms": [norm for norm, _, _ in steps],
        "step_s": [step_s for _, step_s, _ in steps],
        "optimizer_s": [optimizer_s for _, _, optimizer_s in steps],
        "weights": weights.hexdigest(),
        "peak_pss_bytes": memory.peak,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "state_bytes": 2 * 4 * num_local,
    }
    Path(options["report"].format(rank)).write_text(json.dumps(report))
    if options["place"] != "memory":
        optimizer.close()
    dist.destroy_process_group()


def one_step(model: nn.Module, optimizer: Any, rank: int, step: int) -> tuple[float, float, float]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    batch = torch.randn(TOKENS, WIDTH, generator=generator)
    dist.barrier()
    started = time.perf_counter()
    model(batch).square().mean().backward()
    norm = float(shardwise.clip_grad_norm_(model.parameters(), 1.0))
    before = time.perf_counter()
    optimizer.step()
    stepped = time.perf_counter()
    optimizer.zero_grad()
    return norm, stepped - started, stepped - before


def run(place: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    report = str(folder / "rank_{}.json")
    store = folder / "store"
    store.unlink(missing_ok=True)
    hidden = HIDDEN if arguments.millions >= 40 else 64
    options = {
        "place": place,
        "ranks": arguments.ranks,
        "blocks": max(2, round(arguments.millions * 1e6 / PER_BLOCK)),
        "hidden": hidden,
        "steps": arguments.steps,
        "chunk_bytes": parse_size(arguments.chunk),
        "directory": str(folder / "offload"),
        "store": str(store),
        "report": report,
    }
    mp.spawn(rank_main, (options,), nprocs=arguments.ranks)
    return [json.loads(Path(report.format(r)).read_text()) for r in range(arguments.ranks)]


def row_of(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """One place, over its rounds and ranks: the slowest rank of a step counts."""

    def fastest(name: str) -> float:
        return min(
            max(rank[name][step] for rank in ranks)
            for ranks in rounds
            for step in range(1, len(ranks[0][name]))
        )

    def highest(name: str) -> int:
        return max(rank[name] for ranks in rounds for rank in ranks)

    return {
        "step_s": fastest("step_s"),
        "optimizer_s": fastest("optimizer_s"),
        "peak_pss_bytes": highest("peak_pss_bytes"),
        "peak_rss_bytes": highest("peak_rss_bytes"),
    }


def result_of(found: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    first = found["memory"][0]
    bits = [(r["norms"], r["weights"]) for r in first]
    equal = {
        place: all([(r["norms"], r["weights"]) for r in ranks] == bits for ranks in rounds)
        for place, rounds in found.items()
    }
    saved = [  # of each rank in each round, by both measures; the least counts
        (before[name] - after[name]) / before["state_bytes"]
        for one, other in zip(found["memory"], found["nvme"], strict=True)
        for before, after in zip(one, other, strict=True)
        for name in ("peak_pss_bytes", "peak_rss_bytes")
    ]
    rows = {place: row_of(rounds) for place, rounds in found.items()}
    return {
        "state_bytes": max(r["state_bytes"] for r in first),
        "places": rows,
        "saved_share": min(saved),
        "bits_equal": equal,
        "step_of_memory": {p: row["step_s"] / rows["memory"]["step_s"] for p, row in rows.items()},
        "holds": all(equal.values()) and min(saved) >= SAVED_SHARE,
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        "| state in | peak of a rank, PSS | VmHWM | step, s | optimizer, s |",
        "|---|---|---|---|---|",
    ]
    for place, row in result["places"].items():
        pss, rss = (row[f"peak_{name}_bytes"] / 1e6 for name in ("pss", "rss"))
        times = f"{row['step_s']:.2f} | {row['optimizer_s']:.2f}"
        lines.append(f"| {place} | {pss:,.0f} MB | {rss:,.0f} MB | {times} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--millions", type=float, default=400)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--chunk", default="16MiB")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[list[dict[str, Any]]]] = {place: [] for place in PLACES}
    folder = Path(tempfile.mkdtemp(prefix="offload_state_", dir=arguments.directory))
    try:
        for _ in range(arguments.rounds):
            for place in PLACES:
                found[place].append(run(place, arguments, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    given = {k: v for k, v in vars(arguments).items() if k not in ("json", "directory")}
    load = os.getloadavg()[0]
    result = {"machine": describe(), "load": load, **given, **result_of(found)}
    print(table(result), file=sys.stderr)
    text = json.dumps(result)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
