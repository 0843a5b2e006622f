"""Each strategy beside the plain model: losses, gradients and weights of some steps.

The plain model is whole on every rank and computes the batches of all ranks, one after the other;
its gradient is their mean. In bf16 it computes with a bfloat16 copy of its float32 weights, as the
engine's policy says, so that both take the same products. What is left are sums in another order,
and kernels that add in an order of their own (attention, embedding).

SGD with momentum: AdamW's first steps go by the sign of a gradient, also where it is rounding.
Tolerances, of the largest value of a tensor: float32 1e-4, which is some hundred roundings of
2^-24; bfloat16 3e-2, a few of 2^-8, since one product that is rounded the other way is one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.func import functional_call

from gpu_hour_parts import engines
from gpu_hour_parts.settings import Context, Row, Settings
from shardwise.train.config import DecoderConfig
from shardwise.train.decoder import Decoder

TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
NUM_STEPS = 4
NUM_TOKENS = 48
VARIANTS = (*engines.STRATEGIES, "keep")


def items(settings: Settings) -> list[str]:
    return [f"{strategy} {precision}" for precision in TOLERANCE for strategy in VARIANTS]


def run(item: str, context: Context) -> Row:
    strategy, precision = item.split()
    if why := engines.why_not(strategy, context.world):
        return {"state": "skipped", "why": why}
    ours, plain = Sharded(strategy, precision, context), Plain(precision, context)
    worst = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
    where = dict.fromkeys(worst, "")
    for step in range(2 if context.is_dry else NUM_STEPS):
        batches = [tokens_of(rank, step, context) for rank in range(context.world)]
        found, expected = ours.step(batches), plain.step(batches)
        for kind, values in found.items():
            for name, value in values.items():
                if (off := difference(value, expected[kind][name])) > worst[kind]:
                    worst[kind], where[kind] = off, f"step {step + 1} {name}"
    worst = {kind: engines.largest(off, context) for kind, off in worst.items()}
    tolerance = TOLERANCE[precision]
    row: Row = {f"{kind}_off": float(f"{off:.2e}") for kind, off in worst.items()}
    row |= {"tolerance": tolerance, "where": where}
    if not all(off <= tolerance for off in worst.values()):  # nan is wrong too
        kind = max(worst, key=lambda k: worst[k])
        row |= {"state": "wrong", "why": f"{kind} differs most, {where[kind]}"}
    return row


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, of the largest value that was expected; inf where a number is none."""
    off = (found.double() - expected.double()).abs().max().item()
    size = max(expected.double().abs().max().item(), 1e-30)
    return off / size if off == off else float("inf")


def make_model(context: Context) -> Decoder:
    """Odd sizes: cuts are uneven on more than one rank. The same weights on every rank."""
    config = DecoderConfig(dim=36, layers=3, heads=3, hidden=37, vocab_size=51)
    torch.manual_seed(1)
    return Decoder(config, NUM_TOKENS).to(context.device.place)


def tokens_of(rank: int, step: int, context: Context) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(51, (2, NUM_TOKENS + 1), generator=source).to(context.device.place)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


Numbers = dict[str, dict[str, torch.Tensor]]


class Sharded:
    """Under the engine: this rank's batch only."""

    def __init__(self, strategy: str, precision: str, context: Context) -> None:
        model, self.rank = make_model(context), context.rank
        engine = f"shardwise:{strategy}"
        self.model = engines.shard(engine, model, list(model.blocks), context, precision)
        self.optimizer = sgd(self.model.parameters())

    def step(self, batches: list[torch.Tensor]) -> Numbers:
        loss = self.model(batches[self.rank])
        loss.backward()
        grads = {name: whole(p.grad) for name, p in self.model.named_parameters()}
        self.optimizer.step()
        self.optimizer.zero_grad()
        weights = {name: whole(value) for name, value in self.model.state_dict().items()}
        losses = {f"of rank {self.rank}": loss.detach()}
        return {"loss": losses, "gradient": grads, "weight": weights}


class Plain:
    """Whole on this rank: all batches."""

    def __init__(self, precision: str, context: Context) -> None:
        self.model: nn.Module = make_model(context)
        self.precision, self.rank = precision, context.rank
        self.optimizer = sgd(self.model.parameters())

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.precision == "fp32":
            return self.model(tokens)
        low = {name: p.to(torch.bfloat16) for name, p in self.model.named_parameters()}
        return functional_call(self.model, low, (tokens,))

    def step(self, batches: list[torch.Tensor]) -> Numbers:
        losses = []
        for tokens in batches:
            loss = self.loss(tokens)
            loss.backward()
            losses.append(loss.detach())
        grads = {}
        for name, param in self.model.named_parameters():
            assert param.grad is not None
            param.grad /= len(batches)
            grads[name] = param.grad.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        own = {f"of rank {self.rank}": losses[self.rank]}
        return {"loss": own, "gradient": grads, "weight": weights}


def whole(tensor: Any) -> torch.Tensor:
    """All ranks' parts; a collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
