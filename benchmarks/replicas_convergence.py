"""What does meeting every 20 steps only cost in held-out loss, after many steps?

    python benchmarks/replicas_convergence.py                 5 seeds x 1,000 steps: 15 minutes
    python benchmarks/replicas_convergence.py --json PATH --folder DIR
    python benchmarks/replicas_convergence.py --seeds 1 --steps 40   does it all work?

The decoder and data of `wire_convergence.py`. *exact*: two ranks, 16 samples a step. *replicas*:
two jobs of one rank, 8 samples a step each, which meet in `shardwise replicas` (DiLoCo: outer rate
0.7, momentum 0.9); *averaged*: with outer rate 1 and momentum 0, so weights become their mean;
*int8*: differences travel so. A seed is weights and order of data, of the second replica another
order. Runs are paired by seed, and shown as there.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import wire_convergence as wires
from shardwise.bench.machine import describe

NUM_REPLICAS, H = 2, 20
AVERAGED = ("--lr", "1", "--momentum", "0")
# How differences travel, and the outer step; nothing: ranks of one job.
KINDS: dict[str, tuple[str, tuple[str, ...]] | None] = {
    "exact": None,
    f"replicas, H = {H}": ("exact", ()),
    f"averaged, H = {H}": ("exact", AVERAGED),
    f"averaged, H = {H}, int8": ("int8", AVERAGED),
}
_LIMIT_S = 1200.0


def command(
    args: argparse.Namespace, seed: int, directory: Path, meeting: dict[str, object]
) -> list[str]:
    """One job: all samples of a step on two ranks, or a replica's part of them on one."""
    num = NUM_REPLICAS if not meeting else 1
    plain = argparse.Namespace(**{**vars(args), "nproc": num})
    words = wires.command(plain, seed, "exact", directory)
    if meeting:
        words[words.index("--train.global_batch") + 1] = str(16 // NUM_REPLICAS)
        words[words.index("--train.micro_batch") + 1] = str(16 // NUM_REPLICAS)
        words += [text for key, v in meeting.items() for text in (f"--replicas.{key}", str(v))]
    return words


def run(args: argparse.Namespace, seed: int, kind: str, folder: Path) -> dict[str, Any]:
    """One row; what is complete is only read."""
    directory = folder / f"seed{seed}-{re.sub('[^a-z0-9]+', '-', kind)}"
    first = directory / "0"
    rows = wires._rows(first)
    if not rows or rows[-1]["step"] < args.steps:
        directory.mkdir(parents=True, exist_ok=True)
        if meeting := KINDS[kind]:
            _meet(args, seed, *meeting, directory)
        else:
            _finish([_start(command(args, seed, first, {}), directory / "0.log")])
        rows = wires._rows(first)
    seconds = sorted(row["step_time_s"] for row in rows)[len(rows) // 2]
    return {"seed": seed, "wire": kind, "val_loss": rows[-1]["val_loss"], "step_s": seconds}


def _meet(
    args: argparse.Namespace, seed: int, form: str, outer: tuple[str, ...], directory: Path
) -> None:
    log = directory / "coordinator.log"
    log.unlink(missing_ok=True)
    words = ["--dir", str(directory / "outer"), "--replicas", str(NUM_REPLICAS), *outer]
    coordinator = _start(
        [sys.executable, "-m", "shardwise.cli", "replicas", *words, "--steps", str(H), "--port=0"],
        log,
    )
    started = [coordinator]
    try:
        address = _wait_for(log, started, r"at (127\.0\.0\.1:\d+)")
        for number in range(NUM_REPLICAS):
            meeting = {"coordinator": address, "name": f"{number}", "wire": form}
            # The first one's weights are those of all: the same as in the exact run.
            own = command(args, seed + 1000 * number, directory / f"{number}", meeting)
            started.append(_start(own, directory / f"{number}.log"))
            if number == 0:
                _wait_for(log, started, "brought the first weights|goes on at round")
        _finish(started)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(words, stdout=file, stderr=file)


def _wait_for(log: Path, started: list[subprocess.Popen[bytes]], pattern: str) -> str:
    end = time.monotonic() + _LIMIT_S
    while True:
        found = re.search(pattern, log.read_text())
        if found:
            return found[found.re.groups]
        has_ended = any(process.poll() is not None for process in started)
        if has_ended or time.monotonic() > end:
            raise RuntimeError(f"{log}: no {pattern!r}: {log.read_text()[-1000:]}")
        time.sleep(0.1)


def _finish(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        if process.wait(_LIMIT_S):
            raise RuntimeError(f"{process.args} ended with {process.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help=f"a multiple of {H}")
    parser.add_argument("--eval-samples", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where runs are kept; again: the rest")
    args = parser.parse_args()
    if args.steps % H:
        parser.error(f"--steps: {args.steps} is no multiple of {H}")
    runs: list[dict[str, Any]] = []
    wires.WIRES = {kind: {} for kind in KINDS}  # what `summary` makes rows of
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(args.seeds):
            for kind in KINDS:
                try:
                    runs.append(run(args, seed, kind, args.folder or Path(temporary)))
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    return 1
                print(f"seed {seed}, {kind}: {runs[-1]['val_loss']:.4f}", flush=True)
                if args.json is not None:
                    found = {"machine": describe(), "steps": args.steps, "replicas": NUM_REPLICAS}
                    found |= {"rows": wires.summary(runs), "runs": runs}
                    args.json.write_text(json.dumps(found, indent=1) + "\n")
    wires.show(wires.summary(runs), argparse.Namespace(**{**vars(args), "nproc": NUM_REPLICAS}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
