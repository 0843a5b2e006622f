"""Gradients and weights equal those of a plain model that was fed all ranks' data.

Bit for bit where the ranks are added in the oracle's order (see engine_kit), else within 1e-5
relative and 1e-6 absolute: sums of 3 or 4 fp32 numbers in another order differ in their last two
places (2.4e-7 of the largest summand), of which five optimizer steps make a few times as much.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from engine_kit import (
    HYBRID_STRATEGIES,
    MODELS,
    OPTIMIZERS,
    STRATEGIES,
    Plain,
    Setting,
    Uneven,
    batch,
    expected,
    is_exact,
    loss_of,
    make,
    same_grads,
    same_weights,
    settings,
)

import shardwise as sw
from ranks import on_ranks

EVERY = settings(*STRATEGIES, reshard=(True, False, None))
ALONE = [s for s in EVERY if s.transport == "c10d"]
HYBRID = settings(*HYBRID_STRATEGIES)


def train_all(setting: Setting, rank: int, world: int) -> None:
    for cls in MODELS:
        for optimizer in ("sgd", "adamw") if cls is Uneven else ("adamw",):
            train(setting, rank, world, cls, optimizer)


def train(setting: Setting, rank: int, world: int, cls: Any, optimizer: str) -> None:
    exact = is_exact(setting, world)
    model = setting.shard(make(cls), world)
    opt = OPTIMIZERS[optimizer](model.parameters())
    for step, (grads, weights) in enumerate(expected(cls, world, optimizer, 5)):
        what = f"{cls.__name__} {optimizer} step {step}"
        loss_of(model(batch(model, step, rank))).backward()
        same_grads(model, grads, what, exact=exact)
        opt.step()
        opt.zero_grad()
        same_weights(model, weights, what, exact=exact)


@pytest.mark.parametrize("setting", ALONE, ids=lambda s: str(s).removesuffix("-c10d"))
@on_ranks(1)
def test_five_steps_alone(setting: Setting, rank: int, world: int) -> None:
    train_all(setting, rank, world)


@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(2, 3, 4)
def test_five_steps(setting: Setting, rank: int, world: int) -> None:
    train_all(setting, rank, world)


@pytest.mark.parametrize("setting", HYBRID, ids=str)
@on_ranks(4)
def test_five_steps_on_two_by_two(setting: Setting, rank: int, world: int) -> None:
    train_all(setting, rank, world)


def accumulate_all(setting: Setting, rank: int, world: int) -> None:
    for cls in MODELS:
        for way in ("every", "last"):
            accumulate(setting, rank, world, cls, way)


def accumulate(setting: Setting, rank: int, world: int, cls: Any, way: str) -> None:
    """Three micro-batches a step, of which every one is reduced, or the last alone."""
    model = setting.shard(make(cls), world)
    opt = OPTIMIZERS["adamw"](model.parameters())
    for step, (grads, weights) in enumerate(expected_accumulation(cls, world, way)):
        data = micro_batches(cls, step, rank)
        with sw.no_sync(model) if way == "last" else contextlib.nullcontext():
            for x in data[:2]:
                (loss_of(model(x)) / 3).backward()
        (loss_of(model(data[2])) / 3).backward()
        what, exact = f"{cls.__name__} {way} step {step}", is_exact(setting, world)
        same_grads(model, grads, what, exact=exact)
        opt.step()
        opt.zero_grad()
        same_weights(model, weights, what, exact=exact)


def micro_batches(cls: Any, step: int, rank: int) -> list[torch.Tensor]:
    return [batch(cls, 10 * step + i, rank) for i in range(3)]


@functools.cache
def expected_accumulation(cls: Any, world: int, way: str) -> list[Any]:
    oracle = Plain(make(cls), world)
    opt = OPTIMIZERS["adamw"](oracle.model.parameters())
    history = []
    for step in range(2):
        data = [micro_batches(cls, step, r) for r in range(world)]
        if way == "last":
            oracle.backward(*data, scale=1 / 3)
        else:
            for i in range(3):
                oracle.backward(*([d[i]] for d in data), scale=1 / 3)
        grads = oracle.grads()
        opt.step()
        opt.zero_grad()
        history.append((grads, {n: w.clone() for n, w in oracle.weights().items()}))
    return history


@pytest.mark.parametrize("setting", ALONE, ids=lambda s: str(s).removesuffix("-c10d"))
@on_ranks(1)
def test_accumulation_alone(setting: Setting, rank: int, world: int) -> None:
    accumulate_all(setting, rank, world)


@pytest.mark.parametrize("setting", EVERY, ids=str)
@on_ranks(2, 3, 4)
def test_accumulation(setting: Setting, rank: int, world: int) -> None:
    accumulate_all(setting, rank, world)


@pytest.mark.parametrize("setting", HYBRID, ids=str)
@on_ranks(4)
def test_accumulation_on_two_by_two(setting: Setting, rank: int, world: int) -> None:
    accumulate_all(setting, rank, world)
