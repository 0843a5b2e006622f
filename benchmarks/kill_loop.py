"""`shardwise train` under kill -9 at random moments, started again each time until it is done.

    python benchmarks/kill_loop.py [--kills 50] [--out FILE.json]

After each kill: every checkpoint that counts is whole, the newest is not older than before, and the
next start goes on from it. At the end the metrics of all steps equal those of a run that nobody
killed, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shardwise.bench.machine import describe
from shardwise.checkpoint import store

SIZES = {
    "model.dim": 32,
    "model.layers": 2,
    "model.heads": 2,
    "data.seq_len": 32,
    "train.global_batch": 8,
    "train.micro_batch": 4,
    "train.eval_every": 100000,
    "checkpoint.every": 3,
    "run.device": "cpu",
}


def start(run: Path, steps: int, background: bool) -> subprocess.Popen[bytes]:
    words = [f"--{key}={value}" for key, value in SIZES.items()]
    words += [f"--run.dir={run}", f"--train.steps={steps}", "--nproc=2"]
    words += [f"--checkpoint.background={str(background).lower()}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise.cli", "train", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def losses(run: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=0, help="0: 6 for each kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    steps, draw = options.steps or 6 * options.kills, random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="kill_loop_"))
    kills: list[dict[str, Any]] = []
    newest = 0
    try:
        while len(kills) < options.kills:
            process = start(folder / "run", steps, background=len(kills) % 2 == 1)
            at_s, saved = draw.uniform(0.0, 1.5), newest
            deadline = time.monotonic() + 240
            # Half of the kills wait for one more checkpoint, so that the run gets on.
            wants_more = draw.random() < 0.5
            while wants_more and saved <= newest and time.monotonic() < deadline:
                found = store.list_checkpoints(folder / "run/checkpoints").complete
                saved = found[0].step if found else 0
                if process.poll() is not None:
                    break
                time.sleep(0.02)
            time.sleep(at_s * (1 if wants_more else 6))
            ended = process.poll()
            with contextlib.suppress(ProcessLookupError):  # it had ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            found = store.list_checkpoints(folder / "run/checkpoints")
            damaged = [text for c in found.complete for text in store.verify(c)]
            step = found.complete[0].step if found.complete else 0
            left = len(list((folder / "run/checkpoints").glob(".*")))
            kills.append({"newest_step": step, "half_written": left, "had_ended": ended})
            assert not damaged, damaged
            assert not found.skipped, found.skipped
            assert step >= newest, (step, newest)
            newest = step
            print(f"kill {len(kills)}: step {step}, {left} half-written", flush=True)
        for name in ("run", "whole"):
            assert start(folder / name, steps, background=False).wait(1800) == 0
        equal = losses(folder / "run") == losses(folder / "whole")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {
        "machine": describe(),
        "kills": kills,
        "steps": steps,
        "seed": options.seed,
        "during_a_save": sum(bool(k["half_written"]) for k in kills),
        "losses_and_norms_equal_an_unkilled_run": equal,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "kills"}, indent=1))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
