"""What the tests of reproducible runs share: a model of odd widths with dropout, one short training
run on some ranks, and its numbers as exact texts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from engine_kit import HYBRID_STRATEGIES, Block, grid, line

import shardwise as sw

VOCAB, DIM, LENGTH = 97, 12, 7
MIXED = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Odd(nn.Module):
    """Rows that no number of ranks divides (97, 13, 7), dropout, and a gain without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(DIM) for _ in range(2))
        self.narrow, self.wide = nn.Linear(DIM, 13), nn.Linear(13, DIM)
        self.drop = nn.Dropout(0.1)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        for layer in self.layers:
            x = self.drop(layer(x))
        x = x + self.wide(torch.tanh(self.narrow(x))) * self.gain
        return self.head(x)


@dataclass(frozen=True)
class Plan:
    """One way to run the same training."""

    world: int
    num: int = 8
    strategy: str = "full_shard"
    transport: str = "shared_memory"
    steps: int = 4
    mixed: bool = False
    recompute: bool = False
    optimizer: str = "AdamW"

    def __str__(self) -> str:
        more = "-bf16" * self.mixed + "-recompute" * self.recompute
        return f"{self.num}on{self.world}-{self.strategy}-{self.transport}{more}"

    def on(self, world: int, **more: Any) -> Plan:
        return replace(self, world=world, **more)

    def build(self) -> Any:
        torch.manual_seed(3)
        model = Odd()
        hybrid = self.strategy in HYBRID_STRATEGIES
        options: dict[str, Any] = {
            "mesh": grid(2, self.world // 2) if hybrid else line(self.world),
            "strategy": self.strategy,
            "transport": "c10d" if self.world == 1 else self.transport,
        }
        if self.mixed:
            options["mp_policy"] = MIXED
        if self.recompute:
            options["activation_checkpointing"] = True
        return sw.shard_model(model, unit=["Block"], **options)


def tokens_of(step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + index)
    return torch.randint(VOCAB, (3, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, step: int, index: int) -> torch.Tensor:
    tokens = tokens_of(step, index)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    lr = 0.5 if kind == "Adadelta" else 1e-2
    return getattr(torch.optim, kind)(model.parameters(), lr=lr, foreach=True)


def hash_of(tensors: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        whole = tensor.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        digest.update(name.encode())
        digest.update(whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def train(rank: int, world: int, plan: Plan) -> list[str]:
    """On a rank: one line of exact numbers per step, and the hash of the weights at the end."""
    model = plan.build()
    optimizer = optimizer_of(plan.optimizer, model)
    lines = []
    with sw.reproducible(model, optimizer, num_micro_batches=plan.num, seed=5) as run:
        for step in range(plan.steps):
            for micro in run.micro_batches(step):
                loss = loss_of(model, step, micro.index)
                loss.backward()
                micro.log(loss=loss)
            norm = sw.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            lines.append(f"{run.means()['loss'].hex()} {float(norm).hex()}")
    return [*lines, hash_of(model.named_parameters())]
