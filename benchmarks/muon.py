"""Muon on sharded matrices: each matrix by its owner, beside every rank doing all of it.

    python benchmarks/muon.py [--ranks 2] [--model 50M] [--rounds 3] [--json FILE]

The matrices of the decoder's blocks, cut evenly, with gradients that are there already; a step of

    owned     `OwnedOptimizer`: rows travel to each matrix's owner, who steps it, and back
    whole     the same where `whole_matrices` has put each matrix on one rank: nothing travels
    everyone  gradient and weight gathered on every rank, `torch.optim.Muon` on all matrices there,
              this rank's rows taken: what a loop over `full_tensor()` does
    dtensor   `torch.optim.Muon` on the sharded parameters: DTensor moves what its operators need

Ways in turn, the fastest of the rounds. Counted: orthogonalisations on all ranks, and bytes that a
rank sends in a step. Weights behind the steps are compared with those of `torch.optim.Muon` in one
process on the same gradients: equal to the last bit for the first three (exit code 1 if not); for
the last one the largest difference is shown, as a share of the largest update.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import _muon

import shardwise as sw
from shardwise.bench.machine import describe
from shardwise.bench.workload import WORKLOADS
from shardwise.train.columns import Column, console_of, print_columns

WAYS = ("owned", "whole", "everyone", "dtensor")
LR = 0.02


def matrices_of(model: nn.Module) -> list[Any]:
    """Of the blocks: tables and heads are not Muon's."""
    inside = {id(p) for p in model.blocks.parameters()}  # type: ignore[union-attr, operator]
    return [p for p in model.parameters() if p.ndim == 2 and id(p) in inside]


def gradient(number: int, shape: torch.Size, step: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + number))


class Way:
    """One model whose matrices are stepped one way."""

    def __init__(self, name: str, model: str, world: int) -> None:
        self.name = name
        torch.manual_seed(0)
        net = WORKLOADS[model].build()
        mesh = init_device_mesh("cpu", (world,))
        options: dict[str, Any] = {}
        if name == "whole":
            options["shard_placement_fn"] = sw.whole_matrices(net.blocks, world)
        self.model = sw.fully_shard(net, mesh=mesh, **options)
        self.matrices = matrices_of(self.model)
        self.optimizer: Any = None
        if name in ("owned", "whole"):
            self.optimizer = sw.OwnedOptimizer(self.matrices, torch.optim.Muon, lr=LR)
        elif name == "dtensor":
            self.optimizer = torch.optim.Muon(self.matrices, lr=LR)
        else:
            self.wholes = [torch.empty(p.shape, requires_grad=True) for p in self.matrices]
            self.optimizer = torch.optim.Muon(self.wholes, lr=LR)

    def prepare(self, step: int) -> None:
        for number, param in enumerate(self.matrices):
            grad = param.detach().clone()
            grad.copy_(gradient(number, param.shape, step))
            param.grad = grad

    @torch.no_grad()
    def step(self) -> None:
        if self.name == "everyone":
            for whole, param in zip(self.wholes, self.matrices, strict=True):
                whole.copy_(param.full_tensor())
                whole.grad = param.grad.full_tensor()
            self.optimizer.step()
            for whole, param in zip(self.wholes, self.matrices, strict=True):
                param.copy_(whole)
        else:
            self.optimizer.step()


class Counts:
    """Orthogonalisations and bytes sent, of this rank, while it is open."""

    def __init__(self) -> None:
        self.iterations = self.sent = 0

    def __enter__(self) -> Counts:
        self._iterate, self._all_to_all = _muon._zeropower_via_newtonschulz, dist.all_to_all_single

        def iterate(grad: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.iterations += 1
            return self._iterate(grad, *rest)

        def all_to_all(out: Any, sent: Any, out_sizes: Any, sizes: Any, **more: Any) -> Any:
            own = sizes[dist.get_rank()]
            self.sent += sum(sizes) - own
            return self._all_to_all(out, sent, out_sizes, sizes, **more)

        _muon._zeropower_via_newtonschulz = iterate
        dist.all_to_all_single = all_to_all
        return self

    def __exit__(self, *_: object) -> None:
        _muon._zeropower_via_newtonschulz, dist.all_to_all_single = self._iterate, self._all_to_all


def rank_main(rank: int, args: argparse.Namespace, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, args.ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    ways = [Way(name, args.model, args.ranks) for name in WAYS]
    found: dict[str, dict[str, Any]] = {name: {"step_s": []} for name in WAYS}
    for turn in range(args.rounds + 1):  # the first makes state
        for way in ways:
            way.prepare(turn)
            dist.barrier()
            with Counts() as counts:
                began = time.perf_counter()
                way.step()
                dist.barrier()
                took = time.perf_counter() - began
            numbers = torch.tensor([counts.iterations, counts.sent])
            dist.all_reduce(numbers)
            if turn:
                found[way.name]["step_s"].append(took)
            found[way.name]["iterations"] = int(numbers[0])
            found[way.name]["sent_bytes"] = int(numbers[1]) // args.ranks
    expected, before = plain(args)
    for way in ways:
        worst = 0.0
        for param, whole, first in zip(way.matrices, expected, before, strict=True):
            difference = (param.full_tensor() - whole).abs().max() / (whole - first).abs().max()
            worst = max(worst, float(difference.detach()))
        found[way.name]["difference"] = worst
    if rank == 0:
        numel = sum(p.numel() for p in ways[0].matrices)
        queue.put((found, len(ways[0].matrices), numel))
    dist.destroy_process_group()


def plain(args: argparse.Namespace) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The matrices of one process behind the same steps, and before them."""
    torch.manual_seed(0)
    matrices = matrices_of(WORKLOADS[args.model].build())
    before = [p.detach().clone() for p in matrices]
    optimizer = torch.optim.Muon(matrices, lr=LR)
    for turn in range(args.rounds + 1):
        for number, param in enumerate(matrices):
            param.grad = gradient(number, param.shape, turn)
        optimizer.step()
    return [p.detach() for p in matrices], before


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=sorted(WORKLOADS), default="50M")
    parser.add_argument("--rounds", type=int, default=3, help="the fastest is taken")
    parser.add_argument("--json", metavar="PATH", help="write the last line there too")
    args = parser.parse_args(argv)
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    port = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False).port
    mp.spawn(rank_main, (args, port, queue), nprocs=args.ranks)
    found, num_matrices, numel = queue.get()
    everyone = min(found["everyone"]["step_s"])
    rows = [
        {"way": way, **values, "of_everyone": min(values["step_s"]) / everyone}
        for way, values in found.items()
    ]
    columns = [
        Column("way", [r["way"] for r in rows], is_number=False),
        Column("step, s", [f"{min(r['step_s']):.3f}" for r in rows]),
        Column("of everyone", [f"{r['of_everyone']:.2f}" for r in rows]),
        Column("orthogonalised", [f"{r['iterations']}" for r in rows]),
        Column("a rank sends", [f"{r['sent_bytes'] / 1e6:.1f} MB" for r in rows]),
        Column("difference", [f"{r['difference']:.1%}" for r in rows]),
    ]
    title = f"Muon, {num_matrices} matrices of {numel / 1e6:.1f}M, {args.ranks} ranks"
    print_columns(console_of(sys.stdout), title, columns)
    print("Sent: by all-to-all; what DTensor gathers for the last two is not counted.")
    result = {
        "benchmark": "muon", **describe(), "model": args.model, "ranks": args.ranks,
        "matrices": num_matrices, "numel": numel, "rounds": args.rounds, "rows": rows,
    }  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(any(found[way]["difference"] for way in WAYS[:3]))


if __name__ == "__main__":
    raise SystemExit(main())
