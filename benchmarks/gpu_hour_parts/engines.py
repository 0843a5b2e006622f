"""One model under one engine on a device, behind `step(tokens) -> loss`.

    shardwise[:STRATEGY][:keep]    fully_shard of this project; its transport is c10d
    fsdp2[:keep | :hybrid]         torch's fully_shard; hybrid: on a mesh of two dims
    ddp                            torch's DistributedDataParallel; bf16 by autocast

bf16 is computation in bfloat16 over float32 weights, with float32 sums of gradients. Each block of
the decoder is a unit. All have torch's AdamW, fused where the device has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from gpu_hour_parts.settings import Context
from shardwise.train.decoder import Decoder, Rotary

STRATEGIES = (
    "full_shard", "shard_grad_op", "shard_optimizer", "no_shard", "hybrid_shard",
    "hybrid_full_optimizer",
)  # fmt: skip
HYBRID = ("hybrid_shard", "hybrid_full_optimizer", "hybrid")


@dataclass(slots=True)
class Trainer:
    model: Any
    optimizer: torch.optim.Optimizer
    autocast: bool = False

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        around: Any = contextlib.nullcontext()
        if self.autocast:
            around = torch.autocast(tokens.device.type, dtype=torch.bfloat16)
        with around:
            loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def why_not(engine: str, world: int) -> str:
    """Why an engine cannot run on so many ranks; empty where it can."""
    if any(option in HYBRID for option in engine.split(":")) and world % 2:
        return f"two replicas cannot share {world} rank(s) evenly"
    return ""


def mesh_for(engine: str, context: Context) -> DeviceMesh:
    """All ranks on one axis; two replicas where the engine takes both."""
    kind, world = context.device.kind, context.world
    if any(option in HYBRID for option in engine.split(":")):
        names = ("replicate", "shard")
        return init_device_mesh(kind, (2, world // 2), mesh_dim_names=names)
    return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))


def dtypes(precision: str) -> dict[str, Any]:
    """For the policies of both engines."""
    if precision == "bf16":
        return {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    return {}


def shard(
    engine: str,
    model: nn.Module,
    units: list[nn.Module],
    context: Context,
    precision: str,
    **more: Any,
) -> Any:
    """`model` and its units under shardwise or FSDP2; `more` goes to each call."""
    kind, *chosen = engine.split(":")
    options: dict[str, Any] = {"mesh": mesh_for(engine, context), **more}
    if "keep" in chosen:
        options["reshard_after_forward"] = False
    call: Callable[..., Any]
    if kind == "shardwise":
        call = sw.fully_shard
        options |= {"mp_policy": sw.MixedPrecisionPolicy(**dtypes(precision)), "transport": "c10d"}
        if strategy := next((o for o in chosen if o in STRATEGIES), None):
            options["strategy"] = strategy
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        call = fully_shard
        options["mp_policy"] = MixedPrecisionPolicy(**dtypes(precision))
    for unit in units:
        call(unit, **options)
    return call(model, **options)


def adamw(params: Any, context: Context) -> torch.optim.Optimizer:
    fused = context.device.has_fused_adamw
    return torch.optim.AdamW(params, lr=3e-4, fused=fused, foreach=False)


def build_trainer(
    engine: str, make: Callable[[], Decoder], context: Context, precision: str, compiled: bool
) -> Trainer:
    """A decoder that is never whole on a rank, but under DDP."""
    place = context.device.place
    with torch.device(place if engine == "ddp" else "meta"):
        model: Any = make()
    if compiled:
        for block in model.blocks:
            block.compile()
    if engine == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[place.index] if context.device.is_accelerator else None,
            gradient_as_bucket_view=True,  # as `shardwise bench` has it: no second copy
        )
        return Trainer(wrapped, adamw(wrapped.parameters(), context), precision == "bf16")
    model = shard(engine, model, list(model.blocks), context, precision)
    if engine.startswith("shardwise"):
        sw.materialize(model, seed=0)
    else:
        model.to_empty(device=place)
        fill(model)
    return Trainer(model, adamw(model.parameters(), context))


def fill(model: nn.Module) -> None:
    """Weights of the usual size, without communication; each rank draws its own part."""
    with torch.no_grad():
        for param in model.parameters():
            local: Any = param.to_local() if hasattr(param, "to_local") else param
            local.normal_(std=0.02) if param.dim() > 1 else local.fill_(1.0)
    for module in model.modules():
        if isinstance(module, Rotary):
            module.reset_parameters()


def largest(value: float, context: Context) -> float:
    """Of all ranks."""
    found = torch.tensor([value], dtype=torch.float64, device=context.device.place)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
