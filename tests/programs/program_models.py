"""Random models for random programs: blocks of many kinds, in float64.

A seed decides on everything. Sizes are odd on purpose, so that shards are uneven or empty.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

KINDS = ("linear", "mlp", "conv", "embedding", "sparse", "scalar", "norm", "nested", "nested")
KINDS += ("odd", "lists", "bilinear", "lstm", "gru", "complex", "adapter", "adapter", "experts")
FORMS = ("tensor", "tensor", "tuple", "dict", "view")


class Experts(nn.ModuleList):
    """A list with a forward of its own, as mixtures of experts have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((torch.tanh(expert(x)) for expert in self), torch.zeros_like(x))


class Adapter(nn.Module):
    """A frozen layer and a trainable part of low rank beside it, as LoRA adds it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)
        self.is_on = True
        self.flags = (True, True)  # of the two parts, when it was switched off

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return out + self.up(self.down(x)) if self.is_on else out


class Block(nn.Module):
    """One of `KINDS`. It takes hidden values (batch, width) and ids (batch,)."""

    def __init__(self, rng: random.Random, width: int, depth: int, kinds: tuple[str, ...]) -> None:
        super().__init__()
        kind = rng.choice(kinds)
        self.kind = kind = "mlp" if kind == "nested" and depth >= 2 else kind
        self.width, self.depth = width, depth
        getattr(self, f"_build_{kind}")(rng, width, kinds)
        if rng.random() < 0.15:
            self.unused = nn.Linear(3, 2)
        if rng.random() < 0.1:
            self.empty = nn.Parameter(torch.empty(0, 4))
        self.writes_output = rng.random() < 0.15
        self.is_checkpointed = rng.random() < 0.15
        self.form = rng.choice(FORMS)

    # -- one pair of functions a kind ------------------------------------------------------------
    def _build_linear(self, rng: random.Random, w: int, _kinds: Any) -> None:
        self.a = nn.Linear(w, w, bias=rng.random() < 0.5)

    def _run_linear(self, x: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
        return self.a(x)

    def _build_mlp(self, rng: random.Random, w: int, _kinds: Any) -> None:
        inner = rng.choice((1, 3, 5, 11, 16))
        self.a = nn.Linear(w, inner, bias=rng.random() < 0.7)
        self.b = nn.Linear(inner, w, bias=rng.random() < 0.7)

    def _run_mlp(self, x: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))

    def _build_conv(self, _rng: random.Random, _w: int, _kinds: Any) -> None:
        self.a, self.b = nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 1, 1)

    def _run_conv(self, x: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x.unsqueeze(1)))).squeeze(1)

    def _build_embedding(self, rng: random.Random, w: int, _kinds: Any) -> None:
        rows, padding = rng.choice((2, 7, 13)), rng.choice((None, 0))
        self.e = nn.Embedding(rows, w, padding_idx=padding)

    def _run_embedding(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x * self.e(ids % self.e.num_embeddings)

    def _build_sparse(self, rng: random.Random, w: int, _kinds: Any) -> None:
        self.e = nn.Embedding(rng.choice((2, 7, 13)), w, sparse=True)

    _run_sparse = _run_embedding

    def _build_scalar(self, rng: random.Random, w: int, _kinds: Any) -> None:
        self.gain = nn.Parameter(torch.tensor(rng.random()))
        self.one, self.many = nn.Parameter(torch.rand(1)), nn.Parameter(torch.rand(w))

    def _run_scalar(self, x: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.one * self.many

    def _build_norm(self, _rng: random.Random, w: int, _kinds: Any) -> None:
        self.norm = nn.LayerNorm(w)
        self.register_buffer("factor", torch.rand(w))

    def _run_norm(self, x: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.factor

    def _build_nested(self, rng: random.Random, w: int, kinds: Any) -> None:
        num = rng.choice((1, 2, 3))
        self.inner = nn.ModuleList(Block(rng, w, self.depth + 1, kinds) for _ in range(num))
        self.gain = nn.Parameter(torch.rand(w))
        self.runs_again = rng.random() < 0.3

    def _run_nested(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = x
        for block in self.inner:
            y = block.run(y, ids)
        if self.runs_again:
            y = y + self.inner[0].run(y * 0.5, ids)
        return y * self.gain

    def _build_odd(self, _rng: random.Random, w: int, _kinds: Any) -> None:
        self.t = nn.Parameter(torch.randn(w, 2, 3) * 0.3)
        self.u = nn.Parameter(torch.randn(3, 1, w) * 0.3)

    def _run_odd(self, x: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bw,wij,jkv->bv", x, self.t, self.u)

    def _build_lists(self, rng: random.Random, w: int, _kinds: Any) -> None:
        self.some = nn.ParameterList([torch.randn(w) for _ in range(rng.choice((1, 4)))])
        self.named = nn.ParameterDict({"x": torch.randn(w, w) * 0.3})

    def _run_lists(self, x: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
        y = x @ self.named["x"]
        for param in self.some:
            y = y + param
        return y

    def _build_bilinear(self, _rng: random.Random, w: int, _kinds: Any) -> None:
        self.a = nn.Bilinear(w, w, w)

    def _run_bilinear(self, x: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x, x))

    def _build_lstm(self, rng: random.Random, w: int, _kinds: Any) -> None:
        self.r = nn.LSTM(w, w, num_layers=rng.choice((1, 2)), batch_first=True)

    def _build_gru(self, _rng: random.Random, w: int, _kinds: Any) -> None:
        self.r = nn.GRU(w, w, batch_first=True)

    def _run_lstm(self, x: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
        return self.r(x.unsqueeze(1))[0].squeeze(1)

    _run_gru = _run_lstm

    def _build_complex(self, _rng: random.Random, w: int, _kinds: Any) -> None:
        self.z = nn.Parameter(torch.randn(w, w, dtype=torch.complex128) * 0.3)

    def _run_complex(self, x: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.complex128) @ self.z
        return y.real + 0.5 * y.imag

    def _build_adapter(self, _rng: random.Random, w: int, _kinds: Any) -> None:
        self.a = Adapter(w)

    _run_adapter = _run_linear

    def _build_experts(self, rng: random.Random, w: int, _kinds: Any) -> None:
        self.a = Experts(nn.Linear(w, w) for _ in range(rng.choice((1, 3))))

    _run_experts = _run_linear

    # -- calls -----------------------------------------------------------------------------------
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> Any:
        y = torch.tanh(getattr(self, f"_run_{self.kind}")(x, ids)) + 0.5 * x
        if self.writes_output:
            y = y.mul_(1.1)
        if self.form == "tuple":
            return y, None, 3
        if self.form == "dict":
            return {"h": y}
        return y.view(-1, self.width) if self.form == "view" else y

    def _hidden(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = self(x, ids)
        if isinstance(out, tuple):
            return out[0]
        return out["h"] if isinstance(out, dict) else out

    def run(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Call the block as its user would, perhaps to be run again in the backward."""
        if self.is_checkpointed and torch.is_grad_enabled():
            return checkpoint(self._hidden, x, ids, use_reentrant=False)
        return self._hidden(x, ids)


ROUTES = ("plain", "plain", "plain", "residual", "beside", "detached", "without_grad", "shared")
Route = list[tuple[int, str]]  # which block, and how its output is used


def random_route(rng: random.Random, num_blocks: int) -> Route:
    length = rng.randint(1, num_blocks + 2)
    return [(rng.randrange(num_blocks), rng.choice(ROUTES)) for _ in range(length)]


class Net(nn.Module):
    """Blocks between an input layer and a head; a call says in which order they run."""

    def __init__(self, rng: random.Random, kinds: tuple[str, ...] = KINDS) -> None:
        super().__init__()
        w = self.width = rng.choice((3, 5, 8, 13))
        self.blocks = nn.ModuleList(Block(rng, w, 0, kinds) for _ in range(rng.randint(2, 5)))
        self.input = nn.Linear(w, w)
        self.head = nn.Linear(w, rng.choice((1, 4, 9)), bias=rng.random() < 0.5)
        self.shared = nn.Parameter(torch.rand(w))
        self._tie(rng)
        for name, param in self.named_parameters():
            if ".base." not in name and rng.random() < 0.1:
                param.requires_grad_(False)
        self.fails_at: int | None = None

    def _tie(self, rng: random.Random) -> None:
        def is_square(module: nn.Module) -> bool:
            if not isinstance(module, nn.Linear):
                return False
            return module.in_features == module.out_features == self.width

        square: list[Any] = [m for m in self.modules() if is_square(m)]
        if len(square) > 1 and rng.random() < 0.35:
            one, other = rng.sample(square, 2)
            one.weight = other.weight
        if rng.random() < 0.15 and len(self.blocks) > 2:
            self.blocks[-1] = self.blocks[0]

    def forward(self, x: torch.Tensor, ids: torch.Tensor, route: Route) -> torch.Tensor:
        x = torch.tanh(self.input(x))
        for at, (index, how) in enumerate(route):
            if self.fails_at == at:
                raise ArithmeticError("on purpose")
            x = self._follow(how, index, x, ids)
        return self.head(x)

    def _follow(self, how: str, index: int, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        block: Any = self.blocks[index]
        if how == "residual":
            return x + block.run(x, ids)
        if how == "detached":
            return x + block.run(x.detach(), ids)
        if how == "beside":
            other: Any = self.blocks[(index + 1) % len(self.blocks)]
            return block.run(x, ids) + other.run(x * 0.3, ids)
        if how == "without_grad":
            with torch.no_grad():
                return x + block.run(x, ids)
        return x * self.shared if how == "shared" else block.run(x, ids)

    def adapters(self) -> list[Adapter]:
        return [m for m in self.modules() if isinstance(m, Adapter)]

    def switch_adapters(self, *, on: bool) -> None:
        """As peft's `disable_adapter` does it: the flag, and `requires_grad` of the parts."""
        for adapter in self.adapters():
            parts = (adapter.down.weight, adapter.up.weight)
            if adapter.is_on and not on:
                adapter.flags = tuple(part.requires_grad for part in parts)
            for part, flag in zip(parts, adapter.flags, strict=True):
                part.requires_grad_(on and flag)
            adapter.is_on = on
