"""Fine-tuning on packed chats: the same job on 1, 2 and 4 ranks, and killed on the way.

    python benchmarks/finetune_ranks.py [MODEL_DIR --chats FILE] [--json FILE] [--folder DIR]
        [--seed 0] [--worlds 1,2,4] [--resumes 2,4,1,2] [--steps 12] [--levels any_world,off]

An empty list (--resumes=) leaves its part out.

The job is examples/smollm2/finetune.toml with shorter rows (128 tokens; global_batch 4, micro_batch
1); without MODEL_DIR a tiny random model. For each level of `run.reproducible`:

worlds     3 steps on each number of ranks. any_world: losses, gradient norms and the exported
           weights (SHA-256) are the same bits; off: the first loss agrees to 1e-5.
resumes    on the first number of ranks until a random moment of the third or fourth step, when all
           processes are killed with SIGKILL; then on the next number, and so on. Every row of
           metrics.jsonl, and at the end model and optimizer, are compared with those of a run that
           nobody killed. Each rank notes the packed rows that it reads: of the steps that count,
           each row once per epoch.

Exit code 1 where anything of this does not hold; the last line of stdout is the result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from finetune_rows import ReadRows, Rows, run_as_rank
from shardwise.bench.machine import describe
from shardwise.checkpoint import store
from shardwise.checkpoint.comparing import compare
from shardwise.checkpoint.importing import open_source
from shardwise.train.metrics import read_metrics
from shardwise.train.stop import LAUNCHER_VARIABLE
from tiny_model import make_chats, make_model

CONFIG = Path(__file__).parents[1] / "examples" / "smollm2" / "finetune.toml"
GLOBAL_BATCH, WORLD_STEPS, EVERY = 4, 3, 2
# Sums over ranks are rounded in another order. Later steps carry that on, enlarged by AdamW.
FIRST, LATER = 1e-5, 1e-4
EXACT = "any_world"
LIMIT_S = 1800.0  # for one start


class PromiseError(Exception):
    """A promise that did not hold."""


@dataclass(frozen=True, slots=True)
class Job:
    model: Path
    chats: Path
    folder: Path
    level: str
    steps: int
    every: int

    def words(self, name: str) -> list[str]:
        keys = {
            "run.dir": self.folder / name,
            "run.device": "cpu",
            "run.reproducible": self.level,
            "model.path": self.model,
            "data.source": self.chats,
            "data.seq_len": 128,
            "train.steps": self.steps,
            "train.global_batch": GLOBAL_BATCH,
            "train.micro_batch": 1,
            "train.eval_every": 0,
            "train.eval_at_start": "false",
            "optim.warmup_steps": 1,
            "checkpoint.every": self.every,
            "checkpoint.rehearsal": "false",
            "log.trackers": "none",
        }
        return [str(CONFIG), *(f"--{key}={value}" for key, value in keys.items())]


class Start:
    """The ranks of one start, begun as any launcher begins them; each notes the rows it reads."""

    def __init__(self, job: Job, name: str, num_ranks: int, rows: Rows) -> None:
        self.rows, self.log = rows, job.folder / f"{name}.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
        place["LOCAL_WORLD_SIZE"] = str(num_ranks)
        place[LAUNCHER_VARIABLE] = str(os.getpid())  # so they end with this process
        place["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_ranks))
        self.ranks = []
        with self.log.open("a") as log:
            for rank in range(num_ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                words = [__file__, "--as-rank", str(rows.note), *job.words(name)]
                self.ranks.append(
                    subprocess.Popen(
                        [sys.executable, *words],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env={**os.environ, **place, **own},
                    )
                )

    def wait(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while any(rank.poll() is None for rank in self.ranks):
            self._check(deadline)
            time.sleep(0.1)
        self._check(deadline)

    def kill(self, new_steps: int, more_s: float) -> None:
        """All ranks at once, so much time after the first has begun its n-th step."""
        deadline = time.monotonic() + LIMIT_S
        while self.rows.steps_begun() < new_steps:
            self._check(deadline)
            time.sleep(0.005)
        time.sleep(more_s)
        self._check(deadline)
        self.end()

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.wait()

    def _check(self, deadline: float) -> None:
        if any(rank.poll() not in (None, 0) for rank in self.ranks):
            raise PromiseError(f"a rank failed:\n{self.log.read_text()[-3000:]}")
        if time.monotonic() > deadline:
            raise PromiseError(f"not done in {LIMIT_S:.0f} s:\n{self.log.read_text()[-3000:]}")


def run_whole(job: Job, name: str, num_ranks: int, rows: Rows) -> None:
    start = Start(job, name, num_ranks, rows)
    try:
        start.wait()
    finally:
        start.end()


def rows_of(job: Job, name: str) -> list[dict[str, Any]]:
    return read_metrics(job.folder / name / "metrics.jsonl")


def numbers(job: Job, name: str) -> list[dict[str, Any]]:
    keys = ("step", "loss", "grad_norm", "lr")
    return [{key: row[key] for key in keys} for row in rows_of(job, name)]


def exported_hash(job: Job, name: str) -> str:
    """Of the tensors' names, shapes and bytes in the directory that the run has exported."""
    import hashlib

    from safetensors import safe_open

    digest = hashlib.sha256()
    for file in sorted((job.folder / name / "model").glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for key in sorted(tensors.keys()):
                tensor = tensors.get_tensor(key)
                digest.update(f"{key} {list(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def worlds(job: Job, sizes: list[int]) -> dict[str, Any]:
    """The job on each number of ranks, beside the first of them."""
    runs: dict[str, Any] = {}
    for size in sizes:
        name = f"{job.level}_on_{size}"
        started = time.monotonic()
        run_whole(job, name, size, ReadRows(job.folder, name).start(0, size))
        took_s = round(time.monotonic() - started, 1)
        runs[str(size)] = {
            "rows": numbers(job, name),
            "sha256": exported_hash(job, name),
            "seconds": took_s,
        }
        shutil.rmtree(job.folder / name)
        print(
            f"{job.level}, {size} ranks: {[r['loss'] for r in runs[str(size)]['rows']]}", flush=True
        )
    rows = [run["rows"] for run in runs.values()]
    hashes = {run["sha256"] for run in runs.values()}
    result = {
        "runs": runs,
        "first_loss_relative": max(relative(r[0], rows[0][0], "loss") for r in rows),
        "loss_relative": max(differences(r, rows[0], "loss") for r in rows),
        "grad_norm_relative": max(differences(r, rows[0], "grad_norm") for r in rows),
        "same_bits": all(r == rows[0] for r in rows) and len(hashes) == 1,
    }
    agrees = result["first_loss_relative"] <= FIRST
    result["holds"] = result["same_bits"] if job.level == EXACT else agrees
    return result


def relative(row: dict[str, Any], other: dict[str, Any], key: str) -> float:
    return abs(row[key] - other[key]) / abs(other[key])


def differences(rows: list[dict[str, Any]], others: list[dict[str, Any]], key: str) -> float:
    return max(relative(a, b, key) for a, b in zip(rows, others, strict=True))


def resumes(job: Job, sizes: list[int], seed: int) -> dict[str, Any]:
    """Killed and resumed on these numbers of ranks, beside a run that nobody killed."""
    whole, killed = f"{job.level}_whole", f"{job.level}_killed"
    reads = {whole: ReadRows(job.folder, whole), killed: ReadRows(job.folder, killed)}
    run_whole(job, whole, sizes[0], reads[whole].start(0, sizes[0]))
    step_s = statistics.median(row["step_time_s"] for row in rows_of(job, whole))
    draw, starts = random.Random(f"{seed}-{job.level}"), []
    for number, size in enumerate(sizes):
        found = store.list_checkpoints(job.folder / killed / "checkpoints").complete
        first = found[0].step if found else 0
        start = Start(job, killed, size, reads[killed].start(first, size))
        try:
            if number < len(sizes) - 1:
                moment = (draw.randint(EVERY + 1, EVERY + 2), round(draw.uniform(0.0, step_s), 3))
                start.kill(*moment)
            else:
                moment = None
                start.wait()
        finally:
            start.end()
        done = rows_of(job, killed)[-1:]
        starts.append(
            {
                "ranks": size,
                "from": first,
                "done": done[0]["step"] if done else 0,
                "killed_in_its_step_after_s": moment,
            }
        )
        print(f"{job.level}, start {number + 1}: {starts[-1]}", flush=True)
    if starts[-1]["from"] >= job.steps:
        raise PromiseError("the last start had nothing left to do; give more --steps")
    rows, others = numbers(job, killed), numbers(job, whole)
    if [row["step"] for row in rows] != list(range(1, job.steps + 1)):
        raise PromiseError(f"steps {[row['step'] for row in rows]}")
    print_rows(rows, others, starts)
    result: dict[str, Any] = {
        "starts": starts,
        "rows": [{"killed": a, "whole": b} for a, b in zip(rows, others, strict=True)],
        "loss_relative": differences(rows, others, "loss"),
        "grad_norm_relative": differences(rows, others, "grad_norm"),
        "same_bits": rows == others,
    }
    sources = [open_source(job.folder / name) for name in (killed, whole)]
    for kind in ("model", "optim"):
        ends = compare(*sources, f"{kind}.")
        result[f"equal_tensors_{kind}"] = ends.num_equal
        result["same_bits"] &= not ends and ends.num_equal > 0
    result |= read_once(reads[killed], reads[whole], job)
    agrees = result["loss_relative"] <= LATER
    result["holds"] = result["same_bits"] if job.level == EXACT else agrees
    result["holds"] &= result["each_row_once_per_epoch"]
    return result


def read_once(killed: ReadRows, whole: ReadRows, job: Job) -> dict[str, Any]:
    """The rows of the steps that count."""
    mine, theirs = killed.by_step(job.steps), whole.by_step(job.steps)
    once = killed.are_once_per_epoch(mine) and mine == theirs
    return {
        "packed_rows": killed.num_rows,
        "epochs": round(job.steps * GLOBAL_BATCH / killed.num_rows, 2),
        "reads_of_steps_done_again": killed.num_reads - job.steps * GLOBAL_BATCH,
        "each_row_once_per_epoch": once,
    }


def print_rows(rows: list[Any], others: list[Any], starts: list[dict[str, Any]]) -> None:
    print("step  ranks  loss, killed  loss, whole   difference   norm, killed   norm, whole")
    for row, other in zip(rows, others, strict=True):
        ranks = [s["ranks"] for s in starts if s["from"] < row["step"]][-1]
        off = row["loss"] - other["loss"]
        print(
            f"{row['step']:>4}  {ranks:>5}  {row['loss']:12.8f} {other['loss']:12.8f}  {off:+11.1e}"
            f"  {row['grad_norm']:13.8f} {other['grad_norm']:13.8f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--chats", type=Path, help="JSONL; with MODEL_DIR")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--folder", type=Path, help="where runs are written; removed behind each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", default="1,2,4")
    parser.add_argument("--resumes", default="2,4,1,2")
    parser.add_argument("--steps", type=int, default=12, help="of the run that is killed")
    parser.add_argument("--num-chats", type=int, default=40, help="the first so many of the file")
    parser.add_argument("--levels", default="any_world,off")
    args = parser.parse_args()
    if (args.model is None) != (args.chats is None):
        parser.error("MODEL_DIR and --chats go together")
    result: dict[str, Any] = {
        "machine": describe() | {"transformers": metadata.version("transformers")},
        "model": args.model.name if args.model else "tiny",
        "seed": args.seed,
        "config": {"seq_len": 128, "global_batch": GLOBAL_BATCH, "micro_batch": 1},
        "levels": {},
        "holds": False,
    }
    with tempfile.TemporaryDirectory(prefix="finetune_ranks_", dir=args.folder) as name:
        folder = Path(name).absolute()
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        model = (args.model or make_model(folder / "model")).absolute()
        chats = folder / "chats.jsonl"
        lines = (args.chats or make_chats(chats)).read_text().splitlines()[: args.num_chats]
        chats.write_text("\n".join(lines) + "\n")
        try:
            for level in args.levels.split(","):
                job = Job(model, chats, folder, level, WORLD_STEPS, 0)
                found = result["levels"][level] = {}
                if sizes := sizes_of(args.worlds):
                    found["worlds"] = worlds(job, sizes)
                    write(result, args.json)
                if sizes := sizes_of(args.resumes):
                    job = Job(model, chats, folder, level, args.steps, EVERY)
                    found["resumes"] = resumes(job, sizes, args.seed)
                    for run in ("whole", "killed"):
                        shutil.rmtree(folder / f"{level}_{run}")
                    write(result, args.json)
            parts = [part for found in result["levels"].values() for part in found.values()]
            result["holds"] = all(part["holds"] for part in parts)
        except PromiseError as error:
            result["wrong"] = str(error)
            print(error, file=sys.stderr)
    write(result, args.json)
    print(json.dumps(result))
    return 0 if result["holds"] else 1


def write(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")


def sizes_of(text: str) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        run_as_rank(Path(sys.argv[2]), sys.argv[3:])
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
