"""What is trained: decoder sizes, tokens per rank, precision. The same for every engine.

Each rank cycles through a few fixed batches of its own, so the loss falls as they are learnt, and
an engine that averages gradients wrongly ends at another loss (the floor, which does not average at
all, shows how far away that is).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from shardwise.train.config import DecoderConfig
from shardwise.train.decoder import Decoder

Precision = Literal["fp32", "bf16"]
SEED = 20_240_601
NUM_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Workload:
    """A decoder and its batch: one sequence of `num_tokens` per rank."""

    name: str
    layers: int
    dim: int
    heads: int
    num_tokens: int
    vocab_size: int = 4096

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig(
            dim=self.dim, layers=self.layers, heads=self.heads, vocab_size=self.vocab_size
        )

    @property
    def num_params(self) -> int:
        with torch.device("meta"):
            model = Decoder(self.config, self.num_tokens)
        return sum(p.numel() for p in model.parameters())

    def build(self) -> Decoder:
        """The whole model with the same weights on every rank and for every engine."""
        torch.manual_seed(SEED)
        return Decoder(self.config, self.num_tokens)

    def batches(self, rank: int) -> list[torch.Tensor]:
        """This rank's batches, int64 [1, T + 1]."""
        source = torch.Generator().manual_seed(SEED + 1 + rank)
        shape = (1, self.num_tokens + 1)
        return [torch.randint(self.vocab_size, shape, generator=source) for _ in range(NUM_BATCHES)]


WORKLOADS = {
    w.name: w
    for w in (
        Workload("tiny", layers=2, dim=64, heads=2, num_tokens=32, vocab_size=256),
        Workload("50M", layers=6, dim=768, heads=12, num_tokens=256),
        Workload("185M", layers=14, dim=1024, heads=16, num_tokens=512),
    )
}
