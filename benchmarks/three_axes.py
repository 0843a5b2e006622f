"""Data, tensor and pipeline parallel at once, beside one process; checkpoints between them.

    python benchmarks/three_axes.py [--steps 20] [--json FILE]

A small decoder in float32, AdamW. Torch's `parallelize_module` splits attention and MLP over 2
ranks, `fully_shard` shards every layer over 2, torch's 1F1B runs 2 stages under
`shardwise.install()`: 8 ranks. One process trains the same model on all data. Then

    8 ranks, steps 1 to N/2   their checkpoint (`CheckpointManager(stages=True)`)
    8 ranks, steps to N       losses of all steps beside one process
    2 ranks, full_shard       load that checkpoint, take the next step, save
    8 ranks                   load what the 2 saved, take the next step

Shown is the largest difference of a loss from that of one process, relative. Exit code 1: one is
above 1e-5, the bound for sums of float32 in another order over N steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pp
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise as sw
from shardwise.bench.machine import describe
from shardwise.train.columns import Column, console_of, print_columns

VOCAB, DIM, HEAD, LAYERS, LENGTH = 97, 32, 8, 4, 16
MICRO, ROWS, DATA = 4, 2, 2  # micro-batches, samples in one, data parallel ranks
MOST_DIFFERENCE = 1e-5


class Layer(nn.Module):
    """Attention and MLP; the number of heads is that of the part which this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.o = nn.Linear(DIM, DIM, bias=False)
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm_mlp(x))))


SPLIT: dict[str, Any] = {
    **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel),
    **dict.fromkeys(("o", "down"), RowwiseParallel),
}


class Part(nn.Module):
    """All of the decoder, or a stage of it, under the names of the whole."""

    def __init__(self, stage: int | None = None, stages: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding, head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        layers = {str(i): Layer() for i in range(LAYERS)}
        per_stage = LAYERS // stages
        mine = range(LAYERS) if stage is None else range(stage * per_stage, (stage + 1) * per_stage)
        self.embedding = embedding if stage in (None, 0) else None
        self.layers = nn.ModuleDict({str(i): layers[str(i)] for i in mine})
        self.head = head if stage in (None, stages - 1) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * (step % 4) + data_rank)  # learnt over again
    tokens = torch.randint(VOCAB, (MICRO * ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def alone(steps: int) -> list[float]:
    """Losses of one process with all data, in the same micro-batches."""
    model = Part()
    optimizer, losses = adamw(model), []
    for step in range(steps):
        total = 0.0
        for rank in range(DATA):
            for x, y in zip(*(t.chunk(MICRO) for t in batch(step, rank)), strict=True):
                loss = loss_of(model(x), y) / MICRO / DATA
                loss.backward()
                total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def mean_of(own: float | None) -> float:
    """Of the ranks that have a loss."""
    numbers = torch.tensor([own or 0.0, float(own is not None)], dtype=torch.float64)
    dist.all_reduce(numbers)
    return float(numbers[0] / numbers[1])


def on_eight(folder: Path, begin: int, steps: int, *, source: str, saves_at: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipeline", "shard", "tensor"))
    stage, data_rank = mesh.get_local_rank("pipeline"), mesh.get_local_rank("shard")
    part = Part(stage, 2)
    for layer in part.layers.values():
        parallelize_module(layer, mesh["tensor"], {name: how() for name, how in SPLIT.items()})
    for unit in (*part.layers.values(), part):
        sw.fully_shard(unit, mesh=mesh["shard"])
    optimizer, losses = adamw(part), []
    manager = sw.CheckpointManager(folder / "eight", stages=True)
    if source:
        found = sw.CheckpointManager(folder / source, stages=True)
        checkpoint, _ = found.latest()
        assert checkpoint is not None
        found.load(checkpoint, part, optimizer)
    group = mesh.get_group("pipeline")
    run = pp.Schedule1F1B(
        pp.PipelineStage(part, stage, 2, torch.device("cpu"), group=group), MICRO, loss_fn=loss_of
    )
    for step in range(begin, begin + steps):
        x, y = batch(step, data_rank)
        found_losses: list[torch.Tensor] = []
        if stage == 0:
            run.step(x)
        else:
            run.step(target=y, losses=found_losses)
        optimizer.step()
        optimizer.zero_grad()
        own = float(torch.stack(found_losses).mean().detach()) if stage else None
        losses.append(mean_of(own))
        if step + 1 == saves_at:
            manager.save(saves_at, part, optimizer)
    return losses


def on_two(folder: Path, step: int) -> list[float]:
    model = Part()
    mesh = init_device_mesh("cpu", (2,))
    for unit in (*model.layers.values(), model):
        sw.fully_shard(unit, mesh=mesh)
    optimizer = adamw(model)
    manager = sw.CheckpointManager(folder / "eight")
    checkpoint, _ = manager.latest()
    assert checkpoint is not None
    manager.load(checkpoint, model, optimizer)
    total = 0.0
    for x, y in zip(*(t.chunk(MICRO) for t in batch(step, dist.get_rank())), strict=True):
        loss = loss_of(model(x), y) / MICRO
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    sw.CheckpointManager(folder / "two").save(step + 1, model, optimizer)
    return [mean_of(total)]


def rank_main(rank: int, world: int, port: int, phase: str, args: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    folder, half = Path(args["folder"]), args["steps"] // 2
    with sw.install():
        if phase == "all steps":
            losses = on_eight(folder, 0, args["steps"], source="", saves_at=half)
        elif phase == "two ranks":
            losses = on_two(folder, half)
        else:
            losses = on_eight(folder, half + 1, 1, source="two", saves_at=0)
    if rank == 0:
        queue.put(losses)
    dist.destroy_process_group()


def in_processes(world: int, phase: str, args: dict[str, Any]) -> list[float]:
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    port = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False).port
    mp.spawn(rank_main, (world, port, phase, args, queue), nprocs=world)
    return queue.get()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", metavar="PATH", help="write the last line there too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    expected, half = alone(options.steps), options.steps // 2
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        args = {"folder": folder, "steps": options.steps}
        for world, phase, first in (
            (8, "all steps", 0),
            (2, "two ranks", half),
            (8, "back on eight", half + 1),
        ):
            losses = in_processes(world, phase, args)
            wanted = expected[first : first + len(losses)]
            worst = max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))
            rows.append({"phase": phase, "ranks": world, "losses": losses, "difference": worst})
    columns = [
        Column("what", [r["phase"] for r in rows], is_number=False),
        Column("ranks", [f"{r['ranks']}" for r in rows]),
        Column("steps", [f"{len(r['losses'])}" for r in rows]),
        Column("last loss", [f"{r['losses'][-1]:.6f}" for r in rows]),
        Column("difference", [f"{r['difference']:.1e}" for r in rows]),
    ]
    print_columns(console_of(sys.stdout), "Beside one process", columns)
    result = {"benchmark": "three_axes", **describe(), "steps": options.steps, "rows": rows}
    result["alone"] = expected
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(any(row["difference"] > MOST_DIFFERENCE for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
