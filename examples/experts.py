"""A mixture of experts in plain PyTorch: experts on a mesh of their own, all else sharded over all
ranks.

    torchrun --nproc-per-node 4 examples/experts.py --expert-ranks 2

                       expert rank 0       expert rank 1
    data rank 0        rank 0              rank 1            dense layers: sharded over all four
    data rank 1        rank 2              rank 3            experts 0..3: ranks 0 and 2, cut in two
                                                             experts 4..7: ranks 1 and 3, cut in two

Tokens go to the rank that has their expert and come back: two all-to-alls a layer and direction. A
rank's experts see tokens of all its expert ranks, so their gradients are sums over more ranks than
those that share them; `set_gradient_divide_factor` says what to divide by. With `--checkpoint DIR`
it saves at the end, and goes on from there when started again, on any mesh.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise

VOCAB, LENGTH, DIM, HIDDEN, EXPERTS, TOP, LAYERS = 96, 24, 32, 64, 8, 2, 2


class Experts(nn.Module):
    """Stacked two-layer networks; expert i takes rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """`rows` (n, DIM), the first `counts[0]` for the first expert that this rank has."""
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = rows.split(counts)
        return torch.cat([F.silu(x @ up[i]) @ down[i] for i, x in enumerate(parts)])


class MoE(nn.Module):
    """A router and experts; `group`: the ranks among which experts are spread."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.router(rows).softmax(-1).topk(TOP, -1)
        by_expert = chosen.flatten().argsort(stable=True)
        token = by_expert // TOP
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        out = self._through_experts(rows[token], counts) * weights.flatten()[by_expert, None]
        return torch.zeros_like(rows).index_add(0, token, out).view_as(x)

    def _through_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert -> what their experts make of them, in the same order."""
        if self.group is None:
            return self.experts(rows, counts.tolist())
        ranks = dist.get_world_size(self.group)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent = counts.view(ranks, -1).sum(1).tolist()
        received = arriving.view(ranks, -1).sum(1).tolist()
        here = all_to_all_single(
            rows.new_empty(sum(received), DIM), rows, received, sent, group=self.group
        )
        # From (rank, expert) order to expert order, and back.
        own = torch.arange(EXPERTS // ranks).repeat(ranks).repeat_interleave(arriving)
        order = own.argsort(stable=True)
        made = self.experts(here[order], arriving.view(ranks, -1).sum(0).tolist())
        back = torch.empty_like(made).index_copy(0, order, made)
        return all_to_all_single(torch.empty_like(rows), back, sent, received, group=self.group)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.moe = MoE()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2)
            for t in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.moe(self.norms[1](x))


class Model(nn.Module):
    """Token ids (batch, length) -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(model: Model, mesh: DeviceMesh) -> Any:
    """`mesh` has dims "data" and "expert". Experts are spread over the second and sharded over the
    first; all other parameters are sharded over both."""
    everyone, data = mesh._flatten("everyone"), mesh["data"]
    for layer in model.layers:
        assert isinstance(layer, Layer)
        experts = layer.moe.experts
        if mesh["expert"].size() > 1:
            layer.moe.group = mesh.get_group("expert")
            for name, param in list(experts.named_parameters()):
                whole = distribute_tensor(param.detach(), mesh["expert"], [Shard(0)])
                setattr(experts, name, nn.Parameter(whole))
        # Their loss is each rank's mean, so the gradient of the mean over all ranks is the sum over
        # all tokens by the number of all ranks, whichever of them share a parameter.
        shardwise.fully_shard(experts, mesh=data, shard_placement_fn=lambda p: Shard(1))
        experts.set_gradient_divide_factor(everyone.size())
        shardwise.fully_shard(layer, mesh=everyone)
    return shardwise.fully_shard(model, mesh=everyone)


def batch_of(step: int, ranks: int, rank: int, size: int = 8) -> Tensor:
    """This rank's part of a batch: sequences that count up by a number of their own."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCAB, (size, 1), generator=generator)
    stride = torch.randint(1, 6, (size, 1), generator=generator)
    ids = (first + stride * torch.arange(LENGTH + 1)) % VOCAB
    return ids.chunk(ranks)[rank]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--expert-ranks", type=int, default=1, help="ranks among which experts are")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint", default="")
    options = parser.parse_args()
    dist.init_process_group("gloo" if not torch.cuda.is_available() else None)
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % options.expert_ranks or EXPERTS % options.expert_ranks:
        parser.error(f"--expert-ranks must divide {world} ranks and {EXPERTS} experts")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shape = (world // options.expert_ranks, options.expert_ranks)
    torch.manual_seed(0)
    model = shard(
        Model().to(device), init_device_mesh(device, shape, mesh_dim_names=("data", "expert"))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    manager = shardwise.CheckpointManager(options.checkpoint) if options.checkpoint else None
    done = 0
    if manager and (found := manager.latest()[0]) is not None:
        done = manager.load(found, model, optimizer).step
    for step in range(done + 1, options.steps + 1):
        loss = loss_of(model, batch_of(step, world, rank).to(device))
        loss.backward()
        norm = shardwise.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean:.6f} norm {norm:.6f}", flush=True)
    if manager:
        manager.save(options.steps, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
