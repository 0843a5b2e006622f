"""Are the numbers the same on any number of ranks, and what does that cost?

    python benchmarks/any_world.py [--short | --quick] [--parts ...] [--json PATH] [--folder DIR]

1. The same job (`run.reproducible = any_world`, clipping on, vocabulary 97, layers of 26 and of 13
   rows) with 8 and with 12 micro-batches a step on 1, 2, 3, 4 and 8 ranks, under every strategy, on
   both transports, in float32; some of it in bf16, with dropout, with recomputed activations.
   `loss`, `grad_norm`, `val_loss` of every step are compared bit by bit with those of one rank
   (which recomputes nothing), and a hash of all weights at the end. Beside it the same job with
   reproducible = off, which is expected to differ.
2. 2 ranks to step 20, resumed on 4 ranks to step 35, resumed on 1 rank to step 50.
3. Seconds of a step, `off` beside `any_world`, in turns in the same processes.

Exits with 1 if any number of 1 or 2 differs or is missing. PATH is written after every job. With
`--folder`, jobs that ended are kept there, and another call with the same commit does the rest.
`--short`: 14 settings instead of 80. `--quick`: few settings and steps, to test this file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import shardwise as sw
from shardwise.bench.machine import describe
from shardwise.checkpoint import store
from shardwise.checkpoint.manager import CheckpointManager
from shardwise.checkpoint.ranks import Ranks
from shardwise.train.config import DecoderConfig
from shardwise.train.config_file import load_config
from shardwise.train.decoder import Decoder
from shardwise.train.job import train
from shardwise.train.metrics import read_metrics

STRATEGIES = ("full_shard", "shard_grad_op", "shard_optimizer", "no_shard")
ALWAYS, SOMETIMES = ("loss", "grad_norm"), ("val_loss",)  # keys of a row of metrics.jsonl


@dataclass(frozen=True)
class Setting:
    """One way to run the job."""

    world: int
    num: int
    strategy: str
    transport: str
    dtype: str = "float32"
    level: str = "any_world"
    dropout: bool = False
    recompute: bool = False  # activations

    @property
    def name(self) -> str:
        words = [self.level, self.num, "on", self.world, self.strategy, self.transport, self.dtype]
        words += ["dropout"] * self.dropout + ["recompute"] * self.recompute
        return "-".join(map(str, words))

    @property
    def first(self) -> Setting:
        """What it has to equal."""
        return replace(self, world=1, strategy="full_shard", transport="c10d", recompute=False)


def few(num: int) -> list[Setting]:
    """`--short`: one setting for each number of ranks, another strategy and transport each time."""
    ways = [
        (1, "full_shard", "c10d"), (2, "shard_optimizer", "shared_memory"),
        (3, "full_shard", "c10d"), (3, "no_shard", "shared_memory"),
        (4, "hybrid_shard", "shared_memory"), (8, "full_shard", "shared_memory"),
    ]  # fmt: skip
    return [Setting(world, num, strategy, transport) for world, strategy, transport in ways]


def settings(quick: bool, short: bool = False) -> list[Setting]:
    if short:
        off = [Setting(world, 12, "full_shard", "c10d", level="off") for world in (1, 3)]
        return [*few(8), *few(12), *off]
    found = []
    for num in (12,) if quick else (8, 12):
        for world in (1, 2, 3) if quick else (1, 2, 3, 4, 8):
            strategies = [*STRATEGIES, "hybrid_shard"] if world in (4, 8) else list(STRATEGIES)
            for i, strategy in enumerate(strategies if world > 1 else ["full_shard"]):
                if quick and i % 3:
                    continue
                transports = ["shared_memory"] if i % 2 else ["shared_memory", "c10d"]
                usable = transports if world > 1 else ["c10d"]
                found += [Setting(world, num, strategy, transport) for transport in usable]
    bf16 = [s for s in found if s.num == 12 and s.strategy in ("full_shard", "hybrid_shard")]
    found += [replace(s, dtype="bfloat16") for s in bf16 if s.transport != "c10d" or s.world == 1]
    found += [Setting(w, 12, "full_shard", "c10d", level="off") for w in (1, 2, 3)]
    wide = {"num": 12, "transport": "shared_memory", "dropout": True, "recompute": True}
    for dtype in ("float32", "bfloat16"):
        some = [
            Setting(w, strategy=strategy, dtype=dtype, **wide)  # type: ignore[arg-type]
            for w, strategy in ((2, "shard_optimizer"), (3, "full_shard"), (4, "hybrid_shard"),
                                (8, "full_shard"))
            if not quick or w < 4
        ]  # fmt: skip
        found += [some[0].first, replace(some[0].first, recompute=True), *some]
    return found


# -- jobs on ranks -------------------------------------------------------------------------------
def decoder_with_dropout(options: dict[str, Any]) -> nn.Module:
    """A model of `model.kind`."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**options), 32)
    for block in model.blocks:
        block.feed_forward = nn.Sequential(block.feed_forward, nn.Dropout(0.1))
    model.norm = nn.Sequential(model.norm, nn.Dropout(0.1))
    return model


class StopAfter:
    """A request to stop in the n-th step of this process."""

    def __init__(self, steps: int | None) -> None:
        self._left = steps

    @property
    def by(self) -> str:
        if self._left is None:
            return ""
        self._left -= 1
        return "" if self._left else "the benchmark"


def run_job(setting: Setting, folder: Path, steps: int, stop_after: int | None = None) -> str:
    """On a rank: a job in `folder`; returns the hash of the weights that it saved last."""
    hashes: list[str] = []
    save = CheckpointManager.save

    def save_and_hash(self: Any, step: int, model: Any, *args: Any, **kwargs: Any) -> Any:
        hashes.append(hash_of(model))
        return save(self, step, model, *args, **kwargs)

    values = {
        "run.dir": folder, "run.device": "cpu", "run.reproducible": setting.level,
        "data.source": folder.parent / "tokens.npy", "data.seq_len": 32,
        "model.kind": "any_world:decoder_with_dropout" if setting.dropout else "decoder",
        "model.dim": 26, "model.layers": 2, "model.heads": 1, "model.hidden": 13,
        "model.vocab_size": 97, "train.micro_batch": 2, "train.global_batch": 2 * setting.num,
        "train.steps": steps, "train.grad_clip": 0.5, "train.eval_every": max(1, steps // 2),
        "train.eval_samples": 10, "shard.strategy": setting.strategy,
        "shard.transport": setting.transport, "shard.param_dtype": setting.dtype,
        "shard.activation_checkpointing": "full" if setting.recompute else "none",
        "mesh.replicate": 2 if setting.strategy == "hybrid_shard" else 1,
        "checkpoint.every": 0, "checkpoint.rehearsal": "false", "log.every": 10_000,
    }  # fmt: skip
    CheckpointManager.save = save_and_hash  # type: ignore[method-assign]
    try:
        loaded = load_config(None, [(key, str(value)) for key, value in values.items()])
        train(loaded, Ranks(), torch.device("cpu"), StopAfter(stop_after))  # type: ignore[arg-type]
    finally:
        CheckpointManager.save = save  # type: ignore[method-assign]
    dist.barrier()
    return hashes[-1]


def hash_of(model: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(name.encode() + whole.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def jobs_main(rank: int, world: int, folder: str, todo: list[Any], port: int) -> None:
    join(rank, world, port)
    for setting, directory, steps, stop_after in todo:
        digest = run_job(setting, Path(folder, directory), steps, stop_after)
        if rank == 0 and stop_after is None:  # the mark of a job that ended
            Path(folder, directory, "hash").write_text(digest)
    leave()


def join(rank: int, world: int, port: int) -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=world
    )


def leave() -> None:
    """All is written. Tearing down Gloo's threads has hung finished ranks."""
    dist.barrier()
    os._exit(0)


def on_ranks(
    world: int, body: Any, *args: Any, meanwhile: Callable[[], None] = lambda: None
) -> None:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    ranks = mp.start_processes(
        body, (world, *args, port), nprocs=world, join=False, start_method="forkserver"
    )
    assert ranks is not None
    try:
        while not ranks.join(timeout=5):
            meanwhile()
    finally:
        for process in ranks.processes:
            process.kill()


# -- 1 and 2: identical -------------------------------------------------------------------------
def numbers_of(folder: Path) -> dict[str, Any]:
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [
        [float(row[key]).hex() for key in (*ALWAYS, *(k for k in SOMETIMES if k in row))]
        for row in rows
    ]
    return {"steps": steps, "weights": (folder / "hash").read_text()}


def ended(folder: Path, setting: Setting) -> bool:
    return (folder / setting.name / "hash").exists()


def run_jobs(folder: Path, found: list[Setting], steps: int, report: Callable[[], None]) -> None:
    """All that have not ended yet: those on one rank, that others are compared with, then float32
    on all numbers of ranks, then the rest."""
    groups: dict[tuple[bool, int], list[Setting]] = {}
    for setting in found:
        if not ended(folder, setting):
            late = setting.world > 1 and (setting.dtype != "float32" or setting.dropout)
            groups.setdefault((late, setting.world), []).append(setting)
    for (_, world), left in sorted(groups.items()):
        print(f"{len(left)} jobs of {steps} steps on {world} rank(s)", file=sys.stderr, flush=True)
        for setting in left:
            shutil.rmtree(folder / setting.name, ignore_errors=True)  # of an interrupted one
        todo = [(s, s.name, steps, None) for s in left]
        on_ranks(world, jobs_main, str(folder), todo, meanwhile=report)


def same(got: Path, want: Path, steps: int) -> dict[str, Any]:
    """How far two jobs agree."""
    ours, theirs = numbers_of(got), numbers_of(want)
    pairs = zip(ours["steps"], theirs["steps"], strict=False)
    whole = len(ours["steps"]) == len(theirs["steps"]) == steps
    equal = sum(a == b for a, b in pairs) if whole else 0
    return {
        "equal_steps": equal, "steps": steps, "weights": ours["weights"],
        "weights_equal": ours["weights"] == theirs["weights"],
    }  # fmt: skip


def compare(folder: Path, found: list[Setting], steps: int) -> list[dict[str, Any]]:
    """A row for each job that ended."""
    return [
        {
            "setting": s.name, "world": s.world, "micro_batches": s.num, "level": s.level,
            "dtype": s.dtype, **same(folder / s.name, folder / s.first.name, steps),
        }
        for s in found
        if ended(folder, s) and ended(folder, s.first)
    ]  # fmt: skip


def resumed(folder: Path, steps: int, base: Setting) -> dict[str, Any]:
    """2 ranks, then 4, then 1, in one run directory; compared with one rank that nobody stopped."""
    name = f"resumed-{base.name}"
    stops = (2, 1) if steps < 50 else (20, 15)
    if not (folder / name / "hash").exists():
        shutil.rmtree(folder / name, ignore_errors=True)
        for world, stop_after in ((2, stops[0]), (4, stops[1]), (1, None)):
            strategy = "hybrid_shard" if world == 4 else "full_shard"
            transport = "c10d" if world == 1 else "shared_memory"
            setting = replace(base, world=world, strategy=strategy, transport=transport)
            on_ranks(world, jobs_main, str(folder), [(setting, name, steps, stop_after)])
    if not ended(folder, base.first):
        on_ranks(1, jobs_main, str(folder), [(base.first, base.first.name, steps, None)])
    kept = store.list_checkpoints(folder / name / "checkpoints").complete
    return {
        "setting": base.name,
        "checkpoints": [{"step": c.step, "ranks": c.world_size} for c in reversed(kept)],
        **same(folder / name, folder / base.first.name, steps),
    }


# -- 3: cost ------------------------------------------------------------------------------------
class Trainer:
    """One model and its step; `how` is off (fused or foreach AdamW) or any_world."""

    def __init__(self, how: str, strategy: str, transport: str, num: int, quick: bool) -> None:
        self.how, self.num, self.strategy = how, num, strategy
        dim, layers, length = (64, 2, 32) if quick else (256, 4, 128)
        config = DecoderConfig(dim=dim, layers=layers, heads=8, vocab_size=4096)
        torch.manual_seed(0)
        self.length, self.model = length, Decoder(config, length)
        sw.shard_model(self.model, strategy=strategy, transport=transport)
        kind = {"fused": True} if how == "off" else {"foreach": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **kind)
        self.run = sw.reproducible(self.model, self.optimizer, num_micro_batches=num)

    def loss(self, step: int, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + index)
        return self.model(torch.randint(4096, (1, self.length + 1), generator=generator))

    def step(self, step: int) -> None:
        if self.how == "any_world":
            for micro in self.run.micro_batches(step):
                self.loss(step, micro.index).backward()
        else:
            share = self.num // dist.get_world_size()
            first = dist.get_rank() * share
            for k in range(share):
                last = k == share - 1 or self.strategy in ("full_shard", "shard_grad_op")
                self.model.set_requires_gradient_sync(last)
                (self.loss(step, first + k) / share).backward()
        sw.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def cost_main(rank: int, world: int, path: str, quick: bool, port: int) -> None:
    join(rank, world, port)
    rounds, steps, num = (1, 1, 2) if quick else (7, 1, 8)
    rows = []
    cases = [(s, "shared_memory") for s in STRATEGIES] + [("full_shard", "c10d")]
    for strategy, transport in cases[:1] if quick else cases:
        kinds = ("off", "off_foreach", "any_world")
        trainers = {k: Trainer(k, strategy, transport, num, quick) for k in kinds}
        times: dict[str, list[float]] = {k: [] for k in kinds}
        for at in range(rounds + 1):
            for kind, trainer in trainers.items():
                if kind == "any_world":
                    trainer.run.__enter__()
                for k in range(steps):
                    dist.barrier()
                    began = time.perf_counter()
                    trainer.step(at * steps + k)
                    dist.barrier()
                    if at:  # the first round warms up
                        times[kind].append(time.perf_counter() - began)
                if kind == "any_world":
                    trainer.run.__exit__(None, None, None)
        medians = {k: statistics.median(v) for k, v in times.items()}
        ratios = {k: medians["any_world"] / medians[k] for k in ("off", "off_foreach")}
        rows.append({
            "strategy": strategy, "transport": transport, "ranks": world, "micro_batches": num,
            "parameters": sum(p.numel() for p in trainers["off"].model.parameters()),
            "tokens_per_micro_batch": trainers["off"].length,
            "step_s": medians, "ratio_to_off": ratios["off"],
            "ratio_to_off_with_foreach_adamw": ratios["off_foreach"],
        })  # fmt: skip
        if rank == 0:
            Path(path).write_text(json.dumps(rows))
            print(f"{strategy} {transport}: {ratios}", file=sys.stderr, flush=True)
    leave()


def keep_to_one_commit(folder: Path, commit: str) -> None:
    """Jobs of two commits must not be compared."""
    mark = folder / "commit"
    if mark.exists() and mark.read_text() != commit:
        sys.exit(f"{folder} holds jobs of commit {mark.read_text()}, this is {commit}")
    mark.write_text(commit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--parts", nargs="+", default=["identical", "resumed", "cost"])
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what has ended is reported
    multiprocessing.set_forkserver_preload(["torch._dynamo", "shardwise.train.job"])
    with tempfile.TemporaryDirectory(prefix="any_world-") as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        result: dict[str, Any] = {"machine": describe()}
        keep_to_one_commit(folder, result["machine"]["commit"])
        tokens = np.random.default_rng(0).integers(0, 97, 40_000).cumsum() % 97
        np.save(folder / "tokens.npy", tokens.astype(np.uint16))
        steps = 4 if options.quick else 50
        found = settings(options.quick, options.short) if "identical" in options.parts else []

        def report() -> None:
            result["identical"] = compare(folder, found, steps)
            result["missing"] = len(found) - len(result["identical"])
            rows = result["identical"] + result.get("resumed", [])
            promised = [row for row in rows if row.get("level") != "off"]
            result["all_equal"] = not result["missing"] and all(
                row["weights_equal"] and row["equal_steps"] == row["steps"] for row in promised
            )
            if options.json is not None:
                draft = options.json.with_suffix(".new")
                draft.write_text(json.dumps(result, indent=1) + "\n")
                draft.replace(options.json)

        try:
            run_jobs(folder, found, steps, report)
            if "resumed" in options.parts:
                plain = Setting(1, 12, "full_shard", "c10d")
                bases = (plain, replace(plain, dtype="bfloat16", dropout=True, recompute=True))
                result["resumed"] = [resumed(folder, steps, base) for base in bases]
            if "cost" in options.parts:
                on_ranks(2, cost_main, str(folder / "cost.json"), options.quick)
                result["cost"] = json.loads((folder / "cost.json").read_text())
        except KeyboardInterrupt:
            print("interrupted; call it again with the same --folder", file=sys.stderr)
            return 130
        finally:
            report()
    print(json.dumps(result))
    return 0 if result["all_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
