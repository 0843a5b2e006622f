"""What the engine's tests share: small models, ways to shard them, an oracle fed all ranks' data.

A `Setting` is one point of the space that users choose from; its text names the test case. `Plain`
is the oracle: gradients of every rank's data, added in rank order and divided by the number of
ranks. Autograd computes the same bits from the same data, so comparisons can be strict:

    sum of 1 or 2 ranks        one addition, which is commutative               bit-equal
    shared_memory, any world   ranks are added in rank order, as here           bit-equal
    c10d, 3 and 4 ranks        Gloo's order of sums depends on the chunk        last places differ
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw

STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
KEPT = ("no_shard", "shard_optimizer", "shard_grad_op")
HYBRID_STRATEGIES = ("hybrid_shard", "hybrid_full_optimizer")
TRANSPORTS = ("c10d", "shared_memory")


# -- settings ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Setting:
    """One way to call `fully_shard`: a strategy, or a value of `reshard_after_forward`."""

    strategy: str | None = None
    transport: str = "c10d"
    reshard: bool | int | None = None

    def __str__(self) -> str:
        what = self.strategy or f"reshard_{self.reshard}"
        return f"{what}-{self.transport}"

    def options(self, world: int) -> dict[str, Any]:
        """Keyword arguments of `fully_shard` and `shard_model`."""
        mesh = grid(2, world // 2) if self.strategy in HYBRID_STRATEGIES else line(world)
        given: dict[str, Any] = {
            "mesh": mesh,
            "transport": "c10d" if world == 1 else self.transport,
        }
        if self.strategy is not None:
            given["strategy"] = self.strategy
        else:
            given["reshard_after_forward"] = self.reshard
        return given

    def shard(self, model: nn.Module, world: int, **more: Any) -> Any:
        """Shard a model unit by unit: what `units_of` names, then the whole."""
        options = {**self.options(world), **more}
        for unit in units_of(model):
            sw.fully_shard(unit, **options)
        return sw.fully_shard(model, **options)


def settings(*strategies: str, reshard: tuple[Any, ...] = ()) -> list[Setting]:
    """Every given strategy and reshard value on both transports."""
    points = [Setting(s, t) for s in strategies for t in TRANSPORTS]
    return points + [Setting(None, t, r) for r in reshard for t in TRANSPORTS]


@functools.cache
def line(world: int) -> DeviceMesh:
    """All ranks on one dim. Cached: process groups live as long as the rank process."""
    return init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))


@functools.cache
def grid(replicas: int, shards: int) -> DeviceMesh:
    """replicas x shards ranks."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


# -- models --------------------------------------------------------------------------------------
class Mlp(nn.Module):
    """Three layers of even sizes, each a unit; the norm is the root's."""

    features = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


class Uneven(nn.Module):
    """Rows that no world size divides (97, 13, 7, 3), and fewer rows than ranks (1, 2)."""

    features = 5

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(b, c))
            for a, b, c in ((5, 97, 13), (13, 7, 3), (3, 1, 2))
        )
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + 0.1
        return x * self.gain


class Block(nn.Module):
    """A pre-norm transformer block of 2 heads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x_BLD)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.out(mixed.transpose(1, 2).flatten(-2))
        return x_BLD + self.down(F.silu(self.up(self.norm2(x_BLD))))


class Blocks(nn.Module):
    """Embedding with a tied head, two blocks, final norm. Floats in, as for the others."""

    features = 6

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.layers = nn.ModuleList(Block(12) for _ in range(2))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_BLD = self.embed((x.abs() * 7).long() % 11)
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return self.head(self.norm(x_BLD))


class ConvNorm(nn.Module):
    """Convolutions with BatchNorm, whose running statistics stay with the rank."""

    features = 32

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in ((2, 5), (5, 6))
        )
        self.head = nn.Linear(6 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 2, 4, 4)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1))


MODELS: tuple[type[nn.Module], ...] = (Mlp, Uneven, Blocks, ConvNorm)


def make(cls: Callable[[], nn.Module], seed: int = 0) -> Any:
    """The same weights on every rank."""
    torch.manual_seed(seed)
    return cls()


class Branches(nn.Module):
    """Units of which a forward runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, *which: int) -> torch.Tensor:
        for i in which:
            x = torch.tanh(self.layers[i](x))
        return x


def units_of(model: nn.Module) -> list[nn.Module]:
    """What the tests shard on its own before the root."""
    return list(model.layers) if hasattr(model, "layers") else []


def batch(model: Any, step: int, rank: int, rows: int = 4) -> torch.Tensor:
    """One rank's inputs at a step, for a model or its class; the same whoever asks."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, getattr(model, "features", 8), generator=generator)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    """A mean over rows, so that the mean over ranks is the mean over the whole batch."""
    targets = torch.arange(out.shape[-1], dtype=torch.float32).mul(2.0).cos()
    return (out.float() - targets).square().mean()


# -- the oracle ----------------------------------------------------------------------------------
class Plain:
    """A plain model trained on every rank's data; buffers (BatchNorm) are each rank's own."""

    def __init__(self, model: nn.Module, world: int) -> None:
        self.model = copy.deepcopy(model)
        self.world = world
        shared = {id(p): p for p in self.model.parameters()}
        self.replicas = [copy.deepcopy(self.model, memo=dict(shared)) for _ in range(world)]

    def backward(self, *inputs_by_rank: list[torch.Tensor], scale: float = 1.0) -> None:
        """Add the mean gradient; each list holds one rank's micro-batches, reduced together."""
        total: dict[str, torch.Tensor] = {}
        before = {n: p.grad for n, p in self.model.named_parameters()}
        for replica, inputs in zip(self.replicas, inputs_by_rank, strict=True):
            self.model.zero_grad()
            for x in inputs:
                (loss_of(replica(x)) * scale).backward()
            for n, p in self.model.named_parameters():
                if p.grad is not None:
                    total[n] = p.grad if n not in total else total[n] + p.grad
        for n, p in self.model.named_parameters():
            p.grad = before[n]
            if n in total:
                mean = total[n] * (1.0 / self.world)
                p.grad = mean if p.grad is None else p.grad + mean

    def step(self, step: int, rows: int = 4) -> None:
        """One batch of every rank."""
        self.backward(*([batch(self.model, step, r, rows)] for r in range(self.world)))

    def grads(self) -> Tensors:
        return {n: p.grad for n, p in self.model.named_parameters()}

    def weights(self) -> Tensors:
        return {n: p.detach() for n, p in self.model.named_parameters()}


# AdamW divides by the gradient's size: where that is 1e-9, rounding decides the step. Hence eps.
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-4),
}


@functools.cache
def expected(
    cls: type[nn.Module], world: int, optimizer: str, steps: int
) -> list[tuple[Tensors, Tensors]]:
    """The oracle's gradients and weights after each step; all settings ask for the same."""
    oracle = Plain(make(cls), world)
    opt = OPTIMIZERS[optimizer](oracle.model.parameters())
    history = []
    for step in range(steps):
        oracle.step(step)
        grads = oracle.grads()
        opt.step()
        opt.zero_grad()
        history.append((grads, {n: w.clone() for n, w in oracle.weights().items()}))
    return history


# -- comparing -----------------------------------------------------------------------------------
Tensors = dict[str, Any]


def full(tensor: Any) -> torch.Tensor:
    """The whole of a parameter or gradient, sharded or not. A collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """What this rank should hold of `whole`, by torch.chunk's cuts, which are FSDP2's. Strided
    shards are cut last.
    """
    if not isinstance(like, DTensor):
        return whole
    placed = enumerate(like.placements)
    for dim, placement in sorted(placed, key=lambda p: hasattr(p[1], "split_factor")):
        if isinstance(placement, Shard) or hasattr(placement, "split_factor"):
            size, rank = like.device_mesh.size(dim), like.device_mesh.get_local_rank(dim)
            chunks = whole.chunk(size, placement.dim)
            whole = chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def local(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def grads_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: full(p) for n, p in model.named_parameters()}


def same(
    got: torch.Tensor | None, want: torch.Tensor | None, what: str, *, exact: bool = True
) -> None:
    """Bit-equal, or within 1e-5 relative and 1e-6 absolute (fp32, another order of sums)."""
    if want is None or got is None:
        assert got is want, f"{what} is {got}, expected {want}"
    elif exact:
        assert got.dtype == want.dtype and got.shape == want.shape, (
            f"{what}: {got.dtype} {got.shape}"
        )
        assert torch.equal(got, want), (
            f"{what}: not bit-equal, off by {(got - want).abs().max().item():.3g}"
        )
    else:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda m: f"{what}: {m}")


def same_grads(model: nn.Module, expected: Tensors, what: str = "", *, exact: bool = True) -> None:
    """Every gradient lies like its parameter; this rank's part is the expected one's."""
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    for name, p in found.items():
        got, want = p.grad, expected[name]
        if got is not None and want is not None:
            assert got.shape == p.shape and getattr(got, "placements", 0) == getattr(
                p, "placements", 0
            )
            got, want = local(got), part(want, p)
        same(got, want, f"{what}: gradient of {name}", exact=exact)


def same_weights(
    model: nn.Module, expected: Tensors, what: str = "", *, exact: bool = True
) -> None:
    """Names, shapes, and this rank's part of every parameter. No collective."""
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    for name, p in found.items():
        assert p.shape == expected[name].shape
        same(local(p), part(expected[name], p), f"{what}: {name}", exact=exact)


def is_exact(setting: Setting, world: int) -> bool:
    """Whether the ranks are added in the order, and scaled at the moment, of `Plain`."""
    if world <= 2:
        return True
    if setting.transport != "shared_memory" or setting.strategy in HYBRID_STRATEGIES:
        return False
    # Replicas scale before they sum, which rounds unless the world is a power of two.
    return setting.strategy != "no_shard" or world & (world - 1) == 0


def all_agree(value: torch.Tensor) -> bool:
    """The same bits on every rank."""
    lowest, highest = value.clone(), value.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return torch.equal(lowest, highest)
