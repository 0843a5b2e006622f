"""Long sequences: torch's `context_parallel` beside the engine.

Each rank has a part of every sequence; keys and values travel in torch's ring. The engine shards
over the data parallel and the context parallel dim together, since both see other tokens. Torch's
ring takes the fused kernels of GPUs; here CPU gets implementations of the same operators by its own
kernel, so what runs is torch's ring. Sums are those of parts of a sequence: 1e-5 beside one
process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from engine_kit import full
from mesh_kit import named_mesh
from torch.distributed.tensor.experimental import context_parallel

import shardwise as sw
from ranks import on_ranks

aten = torch.ops.aten
VOCAB, DIM, LENGTH, BATCH = 40, 16, 32, 4


@functools.cache
def _kernels_for_cpu() -> torch.library.Library:
    """The operators of flash attention, by the kernel that CPU has."""
    library = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_flash_attention"

    def forward(
        q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False,
        debug: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, scale=scale)
        seed = torch.zeros((), dtype=torch.long)
        return out, lse, None, None, q.shape[2], k.shape[2], seed, seed.clone(), torch.empty(0)

    def backward(
        grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cum_q: Any, cum_k: Any, max_q: int,
        max_k: int, p: float, causal: bool, seed: Any, offset: Any, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, p, causal, scale=scale
        )

    library.impl(name, forward, "CPU")
    library.impl(f"{name}_backward", backward, "CPU")
    return library


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """`F.scaled_dot_product_attention` takes that operator, as it does on a GPU."""
    _kernels_for_cpu()
    before = F.scaled_dot_product_attention

    def scaled_dot_product_attention(q: Any, k: Any, v: Any, *, is_causal: bool) -> Any:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2).contiguous()
            for t in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made() -> Any:
    torch.manual_seed(0)
    return Model()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, labels, places, of the whole batch."""
    ids = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    places = torch.arange(LENGTH).expand(BATCH, -1).clone()
    return ids[:, :-1].clone(), ids[:, 1:].clone(), places


def loss_of(model: Any, ids: torch.Tensor, labels: torch.Tensor, places: torch.Tensor) -> Any:
    return F.cross_entropy(model(ids, places).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("how", ["full_shard", "shard_grad_op", "recomputed", "hybrid"])
@on_ranks(4, timeout_s=120)
def test_like_one_process(rank: int, world: int, how: str) -> None:
    mesh = named_mesh(dp=2, cp=2)
    plain, model = made(), made()
    tokens = mesh._flatten("tokens")
    options: dict[str, Any] = {"mesh": tokens}
    if how == "hybrid":  # replicas over dp, sharded over cp
        options = {"mesh": mesh, "strategy": "hybrid_shard"}
    elif how != "recomputed":
        options["strategy"] = how
    sw.shard_model(model, activation_checkpointing=how == "recomputed", **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    with flash_on_cpu():
        for step in range(3):
            whole = batch(step)
            loss = loss_of(plain, *whole)
            loss.backward()
            own = [t.chunk(2)[mesh.get_local_rank("dp")].clone() for t in whole]
            with context_parallel(mesh["cp"], buffers=own, buffer_seq_dims=[1, 1, 1]):
                assert own[0].shape == (BATCH // 2, LENGTH // 2)
                part = loss_of(model, *own)
                part.backward()
            mean = part.detach() / world
            dist.all_reduce(mean)
            torch.testing.assert_close(mean, loss.detach(), rtol=1e-5, atol=0)
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-5, atol=1e-6, msg=name)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
