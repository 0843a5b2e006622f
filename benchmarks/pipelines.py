"""Gathers and reductions of a unit in a step of torch's pipelining, beside FSDP2's.

    python benchmarks/pipelines.py [--micro 1,4,8] [--json FILE]

4 ranks: 2 stages (4 with interleaved 1F1B) by 2 ranks of `fully_shard`; 2 layers a stage (1), each
a unit. Counted on every rank by a dispatch mode, in the third step: all-gathers, and reductions
(reduce-scatters, or the all-reduce that Gloo makes of one), for each unit that has parameters, and
agreements (all-reduces of a few flags) in all. The same script runs each row; only the engine
differs:

    shardwise           as it is: every micro-batch is reduced by itself
    shardwise, install  under `shardwise.install()`, which torch's pipelining takes for FSDP2
    fsdp2               torch's

each with units released behind the forward and kept (`reshard_after_forward=False`). Gradients of
each step are compared with those of one process that has all data; the largest difference is shown
as a share of the largest gradient. Exit code 1: a rank failed, or a difference above 1e-5.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pp
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.bench.machine import describe
from shardwise.train.columns import Column, console_of, print_columns

STAGES, DATA, LAYERS, WIDTH, ROWS, STEPS = 2, 2, 4, 64, 2, 3
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")
ENGINES = ("shardwise", "shardwise, install", "fsdp2")
MOST_DIFFERENCE = 1e-5  # sums of float32 in another order


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stage(nn.Module):
    """Some of the layers, under the names that they have in the whole."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {str(i): Layer() for i in range(LAYERS)}


def batch(step: int, data_rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    x = torch.randn(micro * ROWS, WIDTH, generator=generator)
    return x, x.roll(1, -1)


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def plain_gradients(micro: int) -> list[dict[str, torch.Tensor]]:
    """Of each step of one process."""
    whole = Stage(layers())
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    history = []
    for step in range(STEPS):
        for rank in range(DATA):
            for x, y in zip(*(t.chunk(micro) for t in batch(step, rank, micro)), strict=True):
                (loss_of(whole(x), y) / DATA / micro).backward()
        history.append({n: p.grad.clone() for n, p in whole.named_parameters()})  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return history


class Collectives(TorchDispatchMode):
    """Counts gathers and reductions of this rank's data parallel group."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        if func.namespace == "c10d" and "gather" in name:
            self.counts["gathers"] += 1
        elif func.namespace == "c10d" and ("reduce_scatter" in name or name == "allreduce_"):
            floats = any(t.is_floating_point() for t in tree_leaves(args) if torch.is_tensor(t))
            self.counts["reductions" if floats else "agreements"] += 1
        return func(*args, **(kwargs or {}))


def run(engine: str, schedule: str, micro: int, keeps: bool, mesh: DeviceMesh) -> dict[str, Any]:
    shard: Any = fsdp.fully_shard if engine == "fsdp2" else sw.fully_shard
    options: dict[str, Any] = {"reshard_after_forward": not keeps}
    if engine != "fsdp2":
        options["transport"] = "c10d"
    at, data_rank = mesh.get_local_rank(0), mesh.get_local_rank(1)
    is_looped = "Interleaved" in schedule
    num_stages = STAGES * (2 if is_looped else 1)
    named, mine = layers(), []
    for index in range(at, num_stages, STAGES):
        per_stage = LAYERS // num_stages
        names = list(named)[index * per_stage : (index + 1) * per_stage]
        module = Stage({name: named[name] for name in names})
        for unit in (*module.layers.values(), module):
            shard(unit, mesh=mesh["shard"], **options)
        mine.append((index, module))
    group, device = mesh.get_group(0), torch.device("cpu")
    stages = [pp.PipelineStage(m, i, num_stages, device, group=group) for i, m in mine]
    cls: Any = getattr(pp, schedule)
    # FSDP2 would divide by the ranks in float32; the schedule divides by micro-batches in any case.
    steps = cls(stages if is_looped else stages[0], micro, loss_fn=loss_of)
    params = [p for _, module in mine for p in module.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    worst, counts = 0.0, Counter[str]()
    for step, want in enumerate(plain_gradients(micro)):
        x, y = batch(step, data_rank, micro)
        with Collectives() as collectives:
            given = {"target": y} if at == STAGES - 1 else {}
            steps.step(*((x,) if at == 0 else ()), **given)
        counts = collectives.counts
        for _, module in mine:
            for name, p in module.named_parameters():
                grad = p.grad.full_tensor()  # type: ignore[union-attr]
                difference = (grad - want[name]).abs().max() / want[name].abs().max()
                worst = max(worst, float(difference))
        optimizer.step()
        optimizer.zero_grad()
    units = sum(len(module.layers) for _, module in mine)
    return {
        "gathers": counts["gathers"] / units,
        "reductions": counts["reductions"] / units,
        "agreements": counts["agreements"],
        "difference": worst,
    }


def rank_main(rank: int, port: int, micros: list[int], queue: Any) -> None:
    torch.set_num_threads(1)
    world = STAGES * DATA
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (STAGES, DATA), mesh_dim_names=("pipeline", "shard"))
    rows = []
    for schedule, micro, engine, keeps in itertools.product(
        SCHEDULES, micros, ENGINES, (False, True)
    ):
        stages = STAGES * (2 if "Interleaved" in schedule else 1)
        if "GPipe" not in schedule and micro < stages:
            continue  # torch refuses it
        installed = sw.install() if "install" in engine else contextlib.nullcontext()
        with installed:
            own = run(engine, schedule, micro, keeps, mesh)
        every: list[Any] = [None] * world
        dist.all_gather_object(every, own)
        most = {key: max(each[key] for each in every) for key in own}
        row = {"schedule": schedule, "micro": micro, "engine": engine, "keeps": keeps}
        rows.append(row | most)
    if rank == 0:
        queue.put(rows)
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--micro", default="1,4,8", help="micro-batches, with commas")
    parser.add_argument("--json", metavar="PATH", help="write the last line there too")
    args = parser.parse_args(argv)
    micros = [int(part) for part in args.micro.split(",")]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    port = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False).port
    mp.spawn(rank_main, (port, micros, queue), nprocs=STAGES * DATA)
    rows = queue.get()
    columns = [
        Column("schedule", [r["schedule"].removeprefix("Schedule") for r in rows], is_number=False),
        Column("micro-batches", [f"{r['micro']}" for r in rows]),
        Column("engine", [r["engine"] for r in rows], is_number=False),
        Column("units are", ["kept" if r["keeps"] else "released" for r in rows], is_number=False),
        Column("gathers", [f"{r['gathers']:g}" for r in rows]),
        Column("reductions", [f"{r['reductions']:g}" for r in rows]),
        Column("agreements", [f"{r['agreements']}" for r in rows]),
        Column("difference", [f"{r['difference']:.0e}" for r in rows]),
    ]
    print_columns(console_of(sys.stdout), "A unit and step, the most of all ranks", columns)
    result = {"benchmark": "pipelines", **describe(), "rows": rows}
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(any(row["difference"] > MOST_DIFFERENCE for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
