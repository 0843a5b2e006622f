"""bf16 compute with fp32 sums: bit-equal to bf16 in one process, within a stated bound of fp32.

The gathered copy is the shard cast to bf16, so forward and backward are those of a bf16 copy of the
plain model, bit for bit; its gradients are added over the ranks in fp32.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_kit import (
    STRATEGIES,
    Blocks,
    Mlp,
    Plain,
    Setting,
    Uneven,
    batch,
    full,
    loss_of,
    make,
    part,
    settings,
)

import shardwise as sw
from ranks import on_ranks

POLICY = sw.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def bf16_grads(plain: Any, step: int, world: int) -> dict[str, torch.Tensor]:
    """fp32 mean of the gradients that a bf16 copy computes on each rank's data."""
    total: dict[str, torch.Tensor] = {}
    for r in range(world):
        low = copy.deepcopy(plain).bfloat16()
        loss_of(low(batch(plain, step, r).bfloat16())).backward()
        for n, p in low.named_parameters():
            g = p.grad.float()
            total[n] = g if n not in total else total[n] + g
    return {n: g * (1 / world) for n, g in total.items()}


@pytest.mark.parametrize("setting", settings(*STRATEGIES, reshard=(False,)), ids=str)
@on_ranks(1, 2)
def test_bit_equal_to_bf16_compute(setting: Setting, rank: int, world: int) -> None:
    for cls in (Mlp, Uneven, Blocks):
        plain = make(cls)
        model = setting.shard(copy.deepcopy(plain), world, mp_policy=POLICY)
        for step in range(2):
            loss_of(model(batch(cls, step, rank))).backward()
            expected = bf16_grads(plain, step, world)
            for name, p in model.named_parameters():
                assert p.dtype == p.grad.dtype == torch.float32
                want = part(expected[name], p)
                assert torch.equal(p.grad.to_local(), want), f"{cls.__name__} {name} step {step}"
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                q.data.sub_(0.1 * expected[next(n for n, t in plain.named_parameters() if t is q)])
                p.grad, g = None, p.grad
                with torch.no_grad():
                    p.sub_(0.1 * g)


@on_ranks(2, 3, 4)
def test_near_to_fp32(rank: int, world: int) -> None:
    """bf16 keeps 8 bits: gradients are within 4% of fp32 ones, relative to each tensor's norm."""
    for setting in settings("full_shard", "shard_grad_op", "no_shard"):
        for cls in (Mlp, Blocks):
            oracle = Plain(make(cls), world)
            model = setting.shard(make(cls), world, mp_policy=POLICY)
            loss_of(model(batch(cls, 0, rank))).backward()
            oracle.step(0)
            for (name, p), q in zip(model.named_parameters(), oracle.grads().values(), strict=True):
                error = (full(p.grad) - q).norm() / q.norm()
                assert error < 0.04, f"{setting} {cls.__name__} {name}: off by {error:.3f}"
