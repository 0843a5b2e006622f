"""Parameters and gradients of other kinds: complex ones, those beside running statistics, gradients
in a dtype of their own, sparse gradients.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn as nn
from engine_kit import HYBRID_STRATEGIES, STRATEGIES, Plain, Setting, batch, full, loss_of, make

import shardwise as sw
from ranks import on_ranks

EVERYWHERE = [
    *(Setting(s, t) for s in STRATEGIES for t in ("c10d", "shared_memory")),
    Setting(None, "shared_memory", False),
]


class Spectral(nn.Module):
    """Complex weights beside real ones, one without dims, rows that nothing divides."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(1))
        self.w = nn.Parameter(torch.randn(5, 3, dtype=torch.cfloat))
        self.gain = nn.Parameter(torch.tensor(1.0 + 0.5j))
        self.odd = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = torch.fft.rfft(torch.tanh(self.layers[0](x)).float())
        return torch.fft.irfft((f @ self.w) * self.gain, n=3) + self.odd


class Normed(nn.Module):
    """Batch norm with running statistics (twice), and one without."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))])
        self.head, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.free = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.free(self.norm(self.head(torch.tanh(self.layers[0](x)))))


class Words(nn.Module):
    """Embeddings with sparse gradients."""

    features = 8

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(11, 6, sparse=True)])
        self.bag = nn.EmbeddingBag(11, 6, mode="sum", sparse=True)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 7).long() % 11
        return self.head(torch.tanh(self.layers[0](words).sum(1) + self.bag(words)))


def as_plain(model: nn.Module, oracle: Plain, what: str, tolerance: float = 1e-5) -> None:
    want = dict(oracle.model.named_parameters())
    for name, p in model.named_parameters():
        for got, wanted in ((p.grad, want[name].grad), (p, want[name])):
            if got is None or wanted is None:
                assert got is wanted is None, f"{what} {name}"
                continue
            wanted = wanted.detach()
            wanted = wanted.to_dense() if wanted.is_sparse else wanted
            got = full(got)
            assert got.dtype == wanted.dtype, f"{what} {name}"
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=None)


def train(cls: Any, setting: Setting, rank: int, world: int, **more: Any) -> None:
    """Steps with clipping, an accumulation without sync among them."""
    oracle = Plain(make(cls), world)
    model = setting.shard(make(cls), world, **more)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle.model)]
    for step in range(3):
        steps = [3 * step, 3 * step + 1] if step == 1 else [3 * step]
        for i in steps:
            with sw.no_sync(model) if i != steps[-1] else contextlib.nullcontext():
                loss_of(model(batch(cls, i, rank))).backward()
        oracle.backward(*([batch(cls, i, r) for i in steps] for r in range(world)))
        for p in oracle.model.parameters():
            p.grad = p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
        as_plain(model, oracle, f"step {step}")
        norm = sw.clip_grad_norm_(model.parameters(), 0.1)
        want = torch.nn.utils.clip_grad_norm_(oracle.model.parameters(), 0.1)
        torch.testing.assert_close(norm, want, rtol=1e-5, atol=1e-6)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    as_plain(model, oracle, "end")


@pytest.mark.parametrize("setting", EVERYWHERE, ids=str)
@on_ranks(2)
def test_complex_parameters(setting: Setting, rank: int, world: int) -> None:
    train(Spectral, setting, rank, world)


@pytest.mark.parametrize("strategy", HYBRID_STRATEGIES)
@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@on_ranks(4)
def test_complex_parameters_on_hybrid_meshes(
    strategy: str, transport: str, rank: int, world: int
) -> None:
    train(Spectral, Setting(strategy, transport), rank, world)


@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@on_ranks(2)
def test_complex_parameters_under_a_policy(
    transport: str, reduce_dtype: torch.dtype | None, rank: int, world: int
) -> None:
    """bf16 rounds the real part of the model: 2e-2. Imaginary parts are as large as real ones."""
    policy = sw.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    oracle = Plain(make(Spectral), world)
    model = Setting("full_shard", transport).shard(make(Spectral), world, mp_policy=policy)
    loss_of(model(batch(Spectral, 0, rank))).backward()
    oracle.step(0)
    want = dict(oracle.model.named_parameters())
    for name in ("w", "gain"):
        grad = full(getattr(model, name).grad)
        assert grad.is_complex() and grad.imag.abs().max() > 0
        torch.testing.assert_close(grad, want[name].grad, rtol=2e-2, atol=2e-2)


@on_ranks(1, 2)
def test_the_norm_of_complex_gradients_in_fixed_order(rank: int, world: int) -> None:
    from shardwise.engine.reproducible.norm import Rows, ordered_norm

    model = Setting("full_shard", "c10d").shard(make(Spectral), world)
    loss_of(model(batch(Spectral, 0, rank))).backward()
    by_id = {id(p.sharded): p for m in model.modules() for p in _params_of(m)}
    rows = [Rows.of(p, by_id[id(p)]) for p in model.parameters()]
    want = sw.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(ordered_norm(rows, 2.0), want, rtol=1e-5, atol=0)


def _params_of(module: nn.Module) -> list[Any]:
    from shardwise.engine.core.state import state_of

    state = state_of(module)
    return state.unit.params if state is not None else []


@pytest.mark.parametrize("setting", EVERYWHERE, ids=str)
@on_ranks(2)
def test_sparse_gradients(setting: Setting, rank: int, world: int) -> None:
    train(Words, setting, rank, world)


@on_ranks(2)
def test_sparse_gradients_of_a_tied_embedding(rank: int, world: int) -> None:
    train(lambda: Words(tied=True), Setting("full_shard", "c10d"), rank, world)


@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@on_ranks(2)
def test_batch_norm_under_a_policy(transport: str, rank: int, world: int) -> None:
    """Parameters beside running statistics keep the dtype of those; each rank has its own batch."""
    policy = sw.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    oracle = Plain(make(Normed), world)
    model = Setting("full_shard", transport).shard(make(Normed), world, mp_policy=policy)
    for step in range(2):
        out = model(batch(Normed, step, rank, 16))
        assert out.dtype == torch.bfloat16
        loss_of(out).backward()
        oracle.step(step, 16)
    for name, p in model.named_parameters():
        want = dict(oracle.model.named_parameters())[name].grad
        torch.testing.assert_close(full(p.grad), want, rtol=5e-2, atol=5e-2)
    assert model.norm.running_mean.dtype == torch.float32 and model.norm.running_mean.any()
    assert model.eval()(batch(Normed, 5, rank)).isfinite().all()


@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_gradients_in_a_dtype_of_their_own(
    transport: str, when: str, rank: int, world: int
) -> None:
    def asks(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad_dtype = torch.float32

    def make_half() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()

    plain = make_half()
    asks(plain)
    oracle = Plain(plain, world)
    asks(oracle.model)
    model = make_half()
    asks(model) if when == "before" else None
    sw.fully_shard(model[0], transport=transport)
    sw.fully_shard(model, transport=transport)
    asks(model) if when == "after" else None
    want: dict[str, torch.Tensor] = {}
    for step in range(2):
        for r in range(world):
            loss_of(oracle.model(batch(model, step, r).bfloat16())).backward()
        loss_of(model(batch(model, step, rank).bfloat16())).backward()
    want = {n: p.grad / world for n, p in oracle.model.named_parameters()}  # type: ignore[operator]
    for name, p in model.named_parameters():
        grad = full(p.grad)
        assert grad.dtype == p.grad_dtype == torch.float32
        torch.testing.assert_close(grad, want[name], rtol=1e-5, atol=1e-7)
    copied = __import__("copy").deepcopy(model)
    assert copied[0].weight.grad_dtype == torch.float32


@on_ranks(4)
def test_norms_of_complex_gradients_with_empty_shards(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(3, 2, dtype=torch.cfloat))
    want = torch.linalg.vector_norm(model.w.detach())
    sw.fully_shard(model)
    for norm in (torch.linalg.vector_norm(model.w), torch.nn.utils.get_total_norm([model.w])):
        torch.testing.assert_close(full(norm.detach()), want)
