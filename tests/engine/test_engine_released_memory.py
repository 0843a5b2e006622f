"""What user code may keep or ask for across passes: right, or an error that names it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import TRANSPORTS, Mlp, batch, line, local, loss_of, make, part

import shardwise as sw
from ranks import on_ranks


class Slots:
    """No dict, no dataclass, no pytree node."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


def closure(t: torch.Tensor) -> Any:
    return lambda: t


def generator(t: torch.Tensor) -> Any:
    return (x for x in [t])


HIDDEN: dict[str, tuple[Any, Any]] = {
    "closure": (closure, lambda out: out()),
    "generator": (generator, next),
    "slots": (Slots, lambda out: out.hidden),
    "nested": (lambda t: {"a": [closure(t)]}, lambda out: out["a"][0]()),
}


class Hides(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inside, self.kind = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), kind

    def forward(self, x: torch.Tensor) -> Any:
        return HIDDEN[self.kind][0](self.inside(x))


@pytest.mark.parametrize("kind", list(HIDDEN))
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_outputs_that_hide_their_tensors(rank: int, world: int, transport: str, kind: str) -> None:
    plain = make(lambda: Hides(kind))
    model = copy.deepcopy(plain)
    sw.fully_shard(model, mesh=line(world), transport=transport, reshard_after_forward=True)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        for m, opt in zip((plain, model), opts, strict=True):
            out = HIDDEN[kind][1](m(batch(Mlp, step, 0).requires_grad_()))
            loss_of(out).backward()
            opt.step()
            opt.zero_grad()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert type(p).__name__ == "ShardTensor", name
            assert torch.equal(local(p), part(q.detach(), p)), name


def sharded(transport: str, world: int) -> nn.Module:
    model = make(Mlp)
    for layer in model.layers:
        sw.fully_shard(layer, mesh=line(world), transport=transport)
    return sw.fully_shard(model, mesh=line(world), transport=transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_gradients_of_model_inputs_and_of_gradients(rank: int, world: int, transport: str) -> None:
    plain, model = make(Mlp), sharded(transport, world)
    for m in (plain, model):
        x = batch(Mlp, 0, 0).requires_grad_()
        (first,) = torch.autograd.grad(loss_of(m(x)), x)
        (again,) = torch.autograd.grad(loss_of(m(x)), x, create_graph=True)
        assert torch.equal(first, again.detach())
        again.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(local(p.grad), part(q.grad, p), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_inference_mode_between_and_before_steps(
    rank: int, world: int, transport: str, first: bool
) -> None:
    plain, model = make(Mlp), sharded(transport, world)
    opts = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    for step in range(3):
        for m, opt in zip((plain, model), opts, strict=True):
            if first or step:
                with torch.inference_mode():
                    m(batch(Mlp, 9, 0))
            loss_of(m(batch(Mlp, step, 0))).backward()
            with torch.inference_mode():
                m(batch(Mlp, 8, 0))
            opt.step()
            opt.zero_grad()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(local(p), part(q.detach(), p)), name
