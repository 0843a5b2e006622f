"""Every line of the README's table of faults, tried on 2 ranks with the default transport.

A comment in each line of the table names its test. The oracle is a plain copy of the model whose
gradients are averaged over the ranks (`average`).
"""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import shardwise as sw
from ranks import on_ranks, spawn_ranks
from shardwise.errors import DivergenceError

README = Path(__file__).parents[2] / "README.md"


class Stack(nn.Module):
    """Three layers; `path` chooses which of them run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.path = [0, 1, 2]
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.path:
            x = torch.tanh(self.layers[i](x))
            if i == 1:
                self.kept = x
        return x


def pair(cls: type[nn.Module] = Stack, seed: int = 0) -> tuple[Any, Any]:
    """Two equal models on all ranks."""
    torch.manual_seed(seed)
    model = cls()
    return model, copy.deepcopy(model)


def shard(model: Any, **options: Any) -> Any:
    for layer in model.layers:
        sw.fully_shard(layer, **options)
    return sw.fully_shard(model, **options)


def data(rank: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * seed + rank))


def average(plain: nn.Module) -> None:
    """Gradients of a plain model over all ranks; a parameter without any stays None."""
    for p in plain.parameters():
        count = torch.tensor(float(p.grad is not None))
        dist.all_reduce(count)
        if count:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def same_grads(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)


def same_weights(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), msg=name)


def test_every_line_has_a_test() -> None:
    """The table's lines carry the names of the tests below as comments, and the reverse."""
    named = set(re.findall(r"<!-- (test_\w+) -->", README.read_text()))
    here = {n for n in globals() if n.startswith("test_")} - {"test_every_line_has_a_test"}
    assert named == here


@on_ranks(2)
def test_branches(rank: int) -> None:
    for units, paths in (
        (True, ([0, 1], [0, 2])),
        (False, ([0, 1], [0, 2])),
        (True, ([0, 1], [0])),
    ):
        model, plain = pair()
        shard(model) if units else sw.fully_shard(model)
        model.path = plain.path = paths[rank]
        for m in (model, plain):
            m(data(rank)).sum().backward()
        average(plain)
        same_grads(model, plain)


def take_other_units(rank: int, world: int) -> str:
    model, _ = pair()
    shard(model, transport="c10d")
    model.path = [0, 1] if rank == 0 else [0, 2]
    with pytest.raises(DivergenceError) as found:
        model(data(rank))
    return str(found.value)


def test_branches_on_c10d() -> None:
    """Other units are refused there. On ranks of its own: they have diverged for good."""
    with spawn_ranks(2, take_other_units) as group:
        outcomes = group.join(30.0)
    assert [o.kind for o in outcomes] == ["ok", "ok"], outcomes
    assert "layers.1" in outcomes[0].value
    assert "rank 1" in outcomes[0].value


@on_ranks(2)
def test_optimizer_before_sharding(rank: int) -> None:
    model, plain = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    shard(model)
    for m in (model, plain):
        m(data(rank)).sum().backward()
    average(plain)
    optimizer.step()
    reference.step()
    same_weights(model, plain)


@on_ranks(2)
def test_zero_grad_without_sync(rank: int) -> None:
    model, plain = pair()
    shard(model)
    with sw.no_sync(model):
        model(data(rank, 1)).sum().backward()
    model.zero_grad()
    for m in (model, plain):
        m(data(rank)).sum().backward()
    average(plain)
    same_grads(model, plain)


@on_ranks(2)
def test_step_without_sync(rank: int) -> None:
    model, plain = pair()
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    with sw.no_sync(model):
        model(data(rank)).sum().backward()
        norm = sw.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    plain(data(rank)).sum().backward()
    average(plain)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    reference.step()
    same_weights(model, plain)


@on_ranks(2)
def test_different_weights(rank: int) -> None:
    torch.manual_seed(0)
    first = Stack()
    torch.manual_seed(rank)
    model = Stack()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwise").addHandler(handler)
    try:
        shard(model)
    finally:
        logging.getLogger("shardwise").removeHandler(handler)
    if rank == 0:  # one rank says so for all
        assert any("weight" in text for text in records)
    same_weights(model, first)


@on_ranks(2)
def test_item_of_a_norm(rank: int) -> None:
    model, plain = pair()
    shard(model)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.norm().item() == pytest.approx(q.norm().item(), rel=1e-6)
        assert p.max().item() == q.max().item()


@on_ranks(1, 2, 3)
def test_random_init(rank: int) -> None:
    model, plain = pair()
    shard(model)
    for m in (model, plain):
        torch.manual_seed(5)
        for p in m.parameters():
            nn.init.normal_(p)
    same_weights(model, plain)


@on_ranks(2)
def test_unowned_parameters(rank: int) -> None:
    model, _ = pair()
    for layer in list(model.layers)[:2]:
        sw.fully_shard(layer)
    with pytest.raises(RuntimeError, match=r"layers\.2\.weight"):
        model(data(rank))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.emb(x)))


@on_ranks(2)
def test_tied_weights(rank: int) -> None:
    for units in ([], ["emb"], ["emb", "head"], ["both"]):
        model, plain = pair(Tied)
        for name in units:
            sw.fully_shard([model.emb, model.head] if name == "both" else getattr(model, name))
        sw.fully_shard(model)
        for m in (model, plain):
            m(data(rank)).sum().backward()
        average(plain)
        same_grads(model, plain)
        assert model.emb.weight is model.head.weight


@on_ranks(2)
def test_tied_after_sharding(rank: int) -> None:
    for units in ([], ["emb"], ["emb", "head"]):
        model, plain = pair(Tied)
        for m in (model, plain):
            m.head.weight = nn.Parameter(m.emb.weight.detach().clone())
        for name in units:
            sw.fully_shard(getattr(model, name))
        sw.fully_shard(model)
        model(data(rank))
        for m in (model, plain):
            m.head.weight = m.emb.weight
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                m(data(rank)).sum().backward()
                if m is plain:
                    average(plain)
                optimizer.step()
        same_grads(model, plain)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q)


@on_ranks(2)
def test_writes_between_forwards(rank: int) -> None:
    for strategy in ("shard_grad_op", "shard_optimizer", "full_shard"):
        model, plain = pair()
        shard(model, strategy=strategy)
        other = Stack()
        for q in other.parameters():
            nn.init.constant_(q, 0.25)
        model(data(rank))
        with torch.no_grad():
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                p.data.copy_(q)
        torch.testing.assert_close(model(data(rank)), other(data(rank)))
        model.load_state_dict(plain.state_dict())
        torch.testing.assert_close(model(data(rank)), plain(data(rank)))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
        for m in (model, plain):
            m(data(rank)).sum().backward()
        average(plain)
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(model(data(rank)), plain(data(rank)))


@on_ranks(2)
def test_step_after_a_kept_copy(rank: int) -> None:
    model, plain = pair()
    shard(model)
    model.set_reshard_after_backward(False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for m in (model, plain):
        m(data(rank)).sum().backward()
    average(plain)
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(model(data(rank)), plain(data(rank)))


class Scaled(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8), persistent=False)


@on_ranks(2)
def test_unfilled_buffer(rank: int) -> None:
    torch.manual_seed(0)
    full = Scaled().state_dict()
    with torch.device("meta"):
        model = Scaled()
    shard(model)
    model.to_empty(device="cpu")
    model.load_state_dict(full)
    with pytest.raises(RuntimeError, match="scale"):
        model(data(rank))


class Breaks(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Breaks.armed:
            raise ValueError("broken on purpose")
        return grad


class Fragile(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x))
        x = Breaks.apply(torch.tanh(self.layers[1](x)))
        return torch.tanh(self.layers[2](x))


@on_ranks(2)
def test_exception(rank: int) -> None:
    for where in ("forward", "backward"):
        model, plain = pair(Fragile)
        shard(model)
        if where == "forward":
            with pytest.raises(RuntimeError):
                model(torch.zeros(4, 5))
        else:
            Breaks.armed = True
            with pytest.raises(ValueError, match="on purpose"):
                model(data(rank, 3)).sum().backward()
            Breaks.armed = False
        model.zero_grad()
        for m in (model, plain):
            m(data(rank)).sum().backward()
        average(plain)
        same_grads(model, plain)


@on_ranks(2)
def test_cached_intermediate(rank: int) -> None:
    model, plain = pair()
    shard(model)
    for m in (model, plain):
        m(data(rank))
        m.kept.square().sum().backward()
    average(plain)
    same_grads(model, plain)


@on_ranks(2)
def test_hooks(rank: int) -> None:
    model, plain = pair()
    fired: list[Any] = []
    model.layers[0].weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.shape))
    shard(model)
    model.layers[1].weight.register_hook(lambda g: 2 * g)
    for m in (model, plain):
        m(data(rank)).sum().backward()
    average(plain)
    plain.layers[1].weight.grad *= 2
    same_grads(model, plain)
    assert fired == [torch.Size([8, 8])]


@on_ranks(2)
def test_evaluation_keeps_nothing(rank: int) -> None:
    model, _ = pair()
    shard(model)
    with torch.no_grad():
        model(data(rank))
    assert all(isinstance(p, sw.ShardTensor) for p in model.parameters())
    held = [p.untyped_storage().nbytes() for p in (u.full for u in _params(model))]
    assert held == [0] * 6


def _params(model: nn.Module) -> list[Any]:
    from shardwise.engine.core.state import units_in

    return [p for unit in units_in(model) for p in unit.params]


@on_ranks(2)
def test_reading_optimizer_state(rank: int) -> None:
    model, plain = pair()
    shard(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    assert sw.get_optimizer_state_dict(model, optimizers[0])["state"] == {}
    for m in (model, plain):
        m(data(rank)).sum().backward()
    average(plain)
    for optimizer in optimizers:
        optimizer.step()
    same_weights(model, plain)


@on_ranks(2)
def test_unequal_token_counts(rank: int) -> None:
    model, plain = pair()
    shard(model)
    counts, total = ((1, 4), (2, 3)), 10.0
    for micro, count in enumerate(counts[rank]):
        model.set_requires_gradient_sync(micro == 1)
        out = model(data(rank, micro)[:count])
        sw.global_mean(out.sum(), count).backward()
        (plain(data(rank, micro)[:count]).sum() * dist.get_world_size() / total).backward()
    average(plain)
    same_grads(model, plain)


@on_ranks(2)
def test_out_of_data(rank: int) -> None:
    model, plain = pair()
    shard(model)
    for x in sw.join(model, [data(rank, i) for i in range(1 + rank)], mode="continue"):
        model.zero_grad()
        model(x).sum().backward()
    plain(data(1, 1)).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@on_ranks(2)
def test_nonfinite(rank: int) -> None:
    model, _ = pair()
    shard(model)
    model(data(rank)).sum().backward()
    name, param = list(model.named_parameters())[2]
    if rank == 1:
        param.grad.to_local().view(-1)[0] = float("nan")
    with pytest.raises(sw.errors.NonFiniteError, match=rf"{name} \(nan on rank 1\)"):
        sw.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
