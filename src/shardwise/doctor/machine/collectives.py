"""What a unit's gather and the reduction of its gradients take, as a job issues them: by the
engine, for each transport. Shards are cold, gradients have just been made.

A unit of as many matrices as a layer has is timed on all ranks; a reduction is a backward whose
gradients are there already. So packing, the collective, unpacking and the delivery are in it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

SIZES = (2**16, 2**20, 2**24, 2**26)
TRANSPORTS = ("shared_memory", "c10d")
_REPEATS = 7
_MATRICES = 8
# What is timed -> the strategy that does it
_KINDS = {"gather": "full_shard", "reduce": "full_shard", "all_reduce": "no_shard"}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of ranks on this host; `size_bytes` is the whole."""

    transport: str
    kind: str
    size_bytes: int
    seconds: float
    ranks: int = 2


def measure_collectives(ranks: int) -> list[Collective]:
    """Collective."""
    return [
        Collective(transport, kind, size, _seconds(transport, kind, size, ranks), ranks)
        for transport in TRANSPORTS
        for kind in _KINDS
        for size in SIZES
    ]


def _seconds(transport: str, kind: str, size: int, ranks: int) -> float:
    import torch
    import torch.distributed as dist

    from shardwise.doctor.machine.compute import evicting, usual_s

    unit = _unit(transport, _KINDS[kind], size, ranks)
    evict, width = evicting(), size // 1024 // _MATRICES
    grad = torch.ones(256, width)

    def once() -> float:
        unit.zero_grad()
        evict()
        loss = None
        if kind != "gather":
            loss = unit([grad.clone() for _ in range(_MATRICES)])
        dist.barrier()
        began = time.perf_counter()
        if loss is None:
            unit.unshard()
        else:
            loss.backward()
        seconds = time.perf_counter() - began
        unit.reshard()
        return seconds

    once()  # makes buffers
    return usual_s(once, _REPEATS, together=True)


def _unit(transport: str, strategy: str, size: int, ranks: int) -> Any:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from shardwise.engine.services.shard_model import shard_model

    class Given(torch.autograd.Function):
        """Gradients that were there before."""

        @staticmethod
        def forward(ctx: Any, grads: list[Any], *weights: Any) -> Any:
            ctx.grads = grads
            return weights[0].new_zeros(())

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return None, *(ctx.grads.pop() for _ in range(_MATRICES))

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = size // 1024 // _MATRICES
            for number in range(_MATRICES):
                self.register_parameter(f"w{number}", nn.Parameter(torch.zeros(256, width)))

        def forward(self, grads: list[Any]) -> Any:
            return Given.apply(grads, *self.parameters())

    model = Unit()
    shard_model(
        model, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",)),
        strategy=strategy, unit="auto", transport=transport,
    )  # fmt: skip
    return model
