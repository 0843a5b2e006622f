"""torch.compile with sharded units: the same numbers as eager, one graph for all equal blocks, no
recompilation after the first step, nothing of the engine in a graph, names unchanged.

`aot_eager` runs the very kernels of eager: bit-equal. Inductor fuses, so its sums have another
order: within 1e-4 relative, 1e-5 absolute in fp32 after three steps.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import Blocks, batch, line, loss_of, make, same, weights_of

import shardwise as sw
from ranks import on_ranks

STEPS = 3


def build(how: str, world: int, **options: Any) -> Any:
    """`Blocks`, its blocks or the whole compiled at some moment before or after sharding."""
    model = make(Blocks)
    mesh = line(world)
    layers: Any = model.layers
    for i, block in enumerate(layers):
        if how == "compile, shard":
            block.compile(**options)
        if how == "wrap, shard":
            layers[i] = torch.compile(block, **options)
        sw.fully_shard(layers[i], mesh=mesh)
        if how == "shard, compile":
            block.compile(**options)
        if how == "shard, wrap":
            layers[i] = torch.compile(block, **options)
    sw.fully_shard(model, mesh=mesh)
    if how == "compile the whole":
        model.compile(**options)
    return torch.compile(model, **options) if how == "wrap the whole" else model


def train(model: Any, rank: int) -> list[float]:
    """Losses; after the first step a recompilation is an error."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            loss = loss_of(model(batch(Blocks, step, rank)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_names(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n.replace("_orig_mod.", ""): w for n, w in weights_of(model).items()}


WAYS = (
    "compile, shard",
    "shard, compile",
    "wrap, shard",
    "shard, wrap",
    "compile the whole",
    "wrap the whole",
)


@pytest.mark.parametrize("how", WAYS)
@on_ranks(2, timeout_s=120)
def test_like_eager(how: str, rank: int, world: int) -> None:
    from torch._dynamo.utils import counters

    eager = build("eager", world)
    expected = train(eager, rank)
    torch._dynamo.reset()
    counters.clear()
    model = build(how, world, backend="aot_eager")
    assert train(model, rank) == expected
    found = plain_names(model)
    for name, value in weights_of(eager).items():
        same(found[name], value, name)
    if "wrap" not in how:
        assert list(model.state_dict()) == list(eager.state_dict())
    assert counters["stats"]["unique_graphs"] == 1  # the blocks share it
    # 22 calls: the block's own. Outside of blocks, dynamo stops at the engine's entry.
    assert counters["stats"]["calls_captured"] == 22
    if how in ("compile, shard", "shard, compile", "wrap, shard"):
        assert not counters["graph_break"] and counters["frames"]["total"] == 1
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPU")
@pytest.mark.parametrize("how", ["shard, compile", "shard, wrap"])
@on_ranks(2, timeout_s=300)
def test_inductor(how: str, rank: int, world: int) -> None:
    torch._dynamo.reset()
    eager, model = build("eager", world), build(how, world)
    expected = train(eager, rank)
    assert train(model, rank) == pytest.approx(expected, rel=1e-4)
    found = plain_names(model)
    for name, value in weights_of(eager).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
    torch._dynamo.reset()
