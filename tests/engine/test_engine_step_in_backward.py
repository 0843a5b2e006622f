"""`step_in_backward`: the numbers of a normal step, and the gradients of one unit at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import (
    HYBRID_STRATEGIES,
    TRANSPORTS,
    Mlp,
    Setting,
    Uneven,
    batch,
    loss_of,
    make,
    settings,
)

import shardwise as sw
from ranks import on_ranks
from shardwise.engine.core.state import units_in
from shardwise.engine.services.step_in_backward import UnitSteps
from shardwise.errors import EngineError

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def trained(cls: Any, setting: Setting, optimizer: str, in_backward: bool, rank: int, world: int):
    model = setting.shard(make(cls), world)
    opt = OPTIMIZERS[optimizer](model.parameters())
    if in_backward:
        sw.step_in_backward(model, opt)
    for step in range(3):
        with sw.no_sync(model):
            loss_of(model(batch(model, 2 * step, rank))).backward()
        loss_of(model(batch(model, 2 * step + 1, rank))).backward()
        if in_backward:
            assert all(p.grad is None for p in model.parameters())
        opt.step()
        opt.zero_grad()
    return model, opt


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_equals_a_step_after_the_backward(
    optimizer: str, transport: str, rank: int, world: int
) -> None:
    for cls, strategy in ((Mlp, "full_shard"), (Uneven, "shard_grad_op"), (Mlp, "no_shard")):
        setting = Setting(strategy, transport)
        expected, before = trained(cls, setting, optimizer, False, rank, world)
        found, after = trained(cls, setting, optimizer, True, rank, world)
        for (name, p), q in zip(expected.named_parameters(), found.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q.full_tensor()), name
        assert before.state_dict()["param_groups"] == after.state_dict()["param_groups"]


@pytest.mark.slow
@on_ranks(4)
def test_hybrid(rank: int, world: int) -> None:
    for setting in settings(*HYBRID_STRATEGIES):
        expected, _ = trained(Mlp, setting, "adamw", False, rank, world)
        found, _ = trained(Mlp, setting, "adamw", True, rank, world)
        for p, q in zip(expected.parameters(), found.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q.full_tensor())


@on_ranks(2)
def test_gradients_of_one_unit_at_a_time(rank: int, world: int) -> None:
    """On c10d, where a reduction is finished at once; the steps come in backward order."""
    model = Setting("full_shard").shard(make(Mlp), world)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sw.step_in_backward(model, opt)
    held: list[list[str]] = []
    params = dict(model.named_parameters())

    def look(*_: Any) -> None:
        held.append([n for n, p in params.items() if p.grad is not None])

    opt.register_step_pre_hook(look)
    loss_of(model(batch(model, 0, rank))).backward()
    order = ["norm", "layers.2", "layers.1", "layers.0"]
    assert held == [[f"{name}.weight", f"{name}.bias"] for name in order]


class Twice(nn.Module):
    """One unit used twice, one tied to another unit."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 1, 2, 1):
            x = torch.tanh(self.layers[i](x))
        return x * self.gain


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_units_that_are_needed_again(transport: str, rank: int, world: int) -> None:
    """Used twice, or tied: they step at the end, and the numbers are those of a normal step."""
    setting = Setting("full_shard", transport)
    expected, _ = trained(Twice, setting, "sgd", False, rank, world)
    found, _ = trained(Twice, setting, "sgd", True, rank, world)
    for (name, p), q in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q[1].full_tensor()), name


@on_ranks(2)
def test_a_gradient_behind_the_step_is_an_error(rank: int, world: int) -> None:
    """No graph that is known makes one; should one do it, the early step must not stay unseen."""
    model = Setting("full_shard").shard(make(Mlp), world)
    sw.step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    unit, steps = units_in(model)[1], UnitSteps()
    unit.num_uses = 1
    steps.issued(unit, [None])
    steps.delivered(unit)
    with pytest.raises(EngineError, match="after the unit's optimizer step"):
        steps.issued(unit, [None])


@on_ranks(2)
def test_what_cannot_be(rank: int, world: int) -> None:
    model = Setting("full_shard").shard(make(Mlp), world)
    some = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"norm\.weight: not in the optimizer"):
        sw.step_in_backward(model, some)
    with pytest.raises(ValueError, match="no sharded module"):
        sw.step_in_backward(make(Mlp), some)
    sw.step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model(batch(model, 0, rank))).backward()
    with pytest.raises(ValueError, match="no gradient is left to clip"):
        sw.clip_grad_norm_(model.parameters(), 1.0)
