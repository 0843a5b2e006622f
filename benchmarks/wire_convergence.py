"""What do wire formats cost in held-out loss, after many steps?

    python benchmarks/wire_convergence.py                        5 seeds x 1,000 steps: half an hour
    python benchmarks/wire_convergence.py --json PATH --folder DIR
    python benchmarks/wire_convergence.py --seeds 2 --steps 20   does it all work?

A small decoder on Python's own sources, by `shardwise train` on c10d, once for each seed and wire.
A seed is weights and order of data: runs of one seed differ in the wire alone, so their difference
is what counts. Shown is the mean over seeds of (held-out loss with the wire - exact), with the 95%
interval of Student's t. A wire is called harmless where the interval's upper end is below +0.01
nats, else its cost is printed.

PATH is written after every run. With `--folder`, runs that are complete are kept there, and another
call with the same arguments does the rest. Exit code 1: a run failed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.bench.machine import describe
from shardwise.train.columns import Column, console_of, print_columns
from shardwise.train.metrics import read_metrics

HARMLESS = 0.01  # nats
WIRES: dict[str, dict[str, object]] = {
    "exact": {},
    "bf16": {"gather_wire": "bf16", "reduce_wire": "bf16"},
    "gather int8": {"gather_wire": "int8"},
    "reduce int8": {"reduce_wire": "int8"},
    "int8": {"gather_wire": "int8", "reduce_wire": "int8"},
    "int8, feedback": {"gather_wire": "int8", "reduce_wire": "int8", "error_feedback": "true"},
}
MODEL = {"dim": 64, "layers": 2, "heads": 2}
# 0.975 quantiles of Student's t for 1, 2, ... degrees of freedom; 1.96 beyond.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
     2.145, 2.131, 2.120, 2.110, 2.101, 2.093)  # fmt: skip


def interval(differences: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half of the 95% interval; None where one value tells nothing of the spread."""
    mean, number = statistics.fmean(differences), len(differences)
    if number < 2:
        return mean, None
    t = T[number - 2] if number - 2 < len(T) else 1.96
    return mean, t * statistics.stdev(differences) / math.sqrt(number)


def command(args: argparse.Namespace, seed: int, wire: str, directory: Path) -> list[str]:
    keys: dict[str, object] = {
        "run.dir": directory, "run.seed": seed, "run.device": "cpu", "run.threads": 1,
        **{f"model.{key}": value for key, value in MODEL.items()},
        "data.seq_len": 128,
        "train.steps": args.steps, "train.global_batch": 16, "train.micro_batch": 16 // args.nproc,
        "train.eval_every": args.steps, "train.eval_samples": args.eval_samples,
        "checkpoint.every": 0, "checkpoint.keep": 1, "log.every": args.steps,
        "shard.transport": "c10d",
        **{f"shard.{key}": value for key, value in WIRES[wire].items()},
    }  # fmt: skip
    options = [text for key, value in keys.items() for text in (f"--{key}", str(value))]
    return [sys.executable, "-m", "shardwise.cli", "train", "--nproc", str(args.nproc), *options]


def run(args: argparse.Namespace, seed: int, wire: str, folder: Path) -> dict[str, Any]:
    """One run's row; one that is complete is only read."""
    directory = folder / f"seed{seed}-{wire.replace(', ', '-').replace(' ', '-')}"
    rows = _rows(directory)
    if not rows or rows[-1]["step"] < args.steps:
        done = subprocess.run(
            command(args, seed, wire, directory), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"seed {seed}, {wire}: {done.stderr.strip()[-2000:]}")
        rows = _rows(directory)
    seconds = statistics.median(row["step_time_s"] for row in rows[len(rows) // 5 :])
    held_out = rows[-1]["val_loss"]
    return {"seed": seed, "wire": wire, "val_loss": held_out, "step_s": seconds}


def _rows(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    return list(read_metrics(path)) if path.exists() else []


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each wire, of the seeds that both it and exact have."""
    losses = {(run["wire"], run["seed"]): run["val_loss"] for run in runs}
    found = []
    for wire in WIRES:
        seeds = [s for w, s in losses if w == wire and ("exact", s) in losses]
        if not seeds:
            continue
        mean, half = interval([losses[wire, s] - losses["exact", s] for s in seeds])
        found.append(
            {
                "wire": wire,
                "seeds": len(seeds),
                "val_loss": statistics.fmean(losses[wire, s] for s in seeds),
                "difference": mean,
                "half_interval": half,
                "is_harmless": half is not None and mean + half < HARMLESS,
            }
        )
    return found


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    def verdict(row: dict[str, Any]) -> str:
        if row["wire"] == "exact":
            return ""
        if row["half_interval"] is None:
            return "one seed says nothing"
        return "harmless" if row["is_harmless"] else "a cost, or too few seeds to tell"

    columns = [
        Column("wire", [row["wire"] for row in rows], is_number=False),
        Column("seeds", [str(row["seeds"]) for row in rows]),
        Column("held-out loss", [f"{row['val_loss']:.4f}" for row in rows]),
        Column("difference", [f"{row['difference']:+.4f}" for row in rows]),
        Column("95%", [f"+-{row['half_interval'] or 0:.4f}" for row in rows]),
        Column("", [verdict(row) for row in rows], is_number=False),
    ]
    title = f"{args.steps:,} steps on {args.nproc} ranks, nats per byte"
    print_columns(console_of(sys.stdout), title, columns)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--nproc", type=int, choices=(1, 2, 4, 8), default=2)
    parser.add_argument("--eval-samples", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        for seed in range(args.seeds):
            for wire in WIRES:
                try:
                    runs.append(run(args, seed, wire, folder))
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    return 1
                print(f"seed {seed}, {wire}: {runs[-1]['val_loss']:.4f}", flush=True)
                rows = summary(runs)
                if args.json is not None:
                    found = {"machine": describe(), "steps": args.steps, "ranks": args.nproc}
                    found |= {"model": MODEL, "wires": WIRES, "rows": rows, "runs": runs}
                    args.json.write_text(json.dumps(found, indent=1) + "\n")
    show(summary(runs), args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
