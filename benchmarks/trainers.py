"""The engines that are compared, each behind one call: `step(batch) -> loss`.

    shardwise[:TRANSPORT[:STRATEGY]]   this project; transport auto, shared_memory, c10d
    fsdp2[:keep]                       torch.distributed.fsdp.fully_shard; `keep` is
                                       reshard_after_forward=False
    ddp                                torch DistributedDataParallel; bf16 by autocast
    floor                              no communication and 1/N of the optimizer's work: what is
                                       left of a step when sharding costs nothing

`@NAME=VALUE` behind a name, several if need be, starts that engine's ranks with these environment
variables: `fsdp2@MALLOC_TRIM_THRESHOLD_=2147483647@MALLOC_MMAP_THRESHOLD_=1073741824` gives torch
the malloc settings that shardwise makes, `shardwise@SHARDWISE_WARM_PAGES=0` takes them from ours.

A unit per decoder block plus the root, defaults otherwise. The optimizer is torch's AdamW with the
same implementation for all, gradients are cleared by `zero_grad(set_to_none=True)`.

bf16 means bf16 computation over fp32 weights with fp32 sums of gradients. The floor's rank then
holds a bf16 model and fp32 masters of its 1/N: it widens 1/N of the gradients, and rounds 1/N of
the weights.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from workloads import Precision

OPTIMIZERS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine by its name on the command line."""

    name: str

    def __post_init__(self) -> None:
        if self.kind not in ("shardwise", "fsdp2", "ddp", "floor"):
            raise ValueError(f"no engine {self.name!r}; there are shardwise, fsdp2, ddp, floor")

    @property
    def kind(self) -> str:
        return self._words[0]

    @property
    def options(self) -> list[str]:
        return self._words[1:]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that its rank processes start with."""
        return dict(item.split("=", 1) for item in self.name.split("@")[1:])

    @property
    def _words(self) -> list[str]:
        return self.name.split("@")[0].split(":")

    @property
    def trains(self) -> bool:
        """False for the floor, which does not train the same model."""
        return self.kind != "floor"


class Trainer:
    """A model, its optimizer, one step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool) -> None:
        self.model = model
        self.optimizer = optimizer
        self._autocast = autocast

    def step(self, batch: Tensor) -> Tensor:
        context: Any = contextlib.nullcontext()
        if self._autocast:
            context = torch.autocast("cpu", dtype=torch.bfloat16)
        with context:
            loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class FloorTrainer:
    """No communication; rank r steps over row block r of every parameter."""

    def __init__(self, model: nn.Module, precision: Precision, optimizer: str, lr: float) -> None:
        self.model = model
        self._parts: list[tuple[nn.Parameter, Tensor, int, int]] = []
        rank, world = dist.get_rank(), dist.get_world_size()
        for param in model.parameters():
            rows = -(-param.shape[0] // world)
            start = min(rank * rows, param.shape[0])
            size = min(rows, param.shape[0] - start)
            own = param.detach().narrow(0, start, size)
            master = own.clone() if precision == "bf16" else own
            self._parts.append((param, nn.Parameter(master), start, size))
        if precision == "bf16":
            model.to(torch.bfloat16)
        masters = [master for _, master, _, _ in self._parts]
        self.optimizer = torch.optim.AdamW(masters, lr=lr, **OPTIMIZERS[optimizer])

    def step(self, batch: Tensor) -> Tensor:
        loss = self.model(batch)
        loss.backward()
        for param, master, start, size in self._parts:
            assert param.grad is not None
            master.grad = param.grad.narrow(0, start, size).to(master.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for param, master, start, size in self._parts:
                if param.dtype != master.dtype:
                    param.narrow(0, start, size).copy_(master)
                param.grad = None
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def make_trainer(
    spec: EngineSpec, model: nn.Module, precision: Precision, optimizer: str, lr: float
) -> Trainer | FloorTrainer:
    """Shard or wrap `model`, whose blocks are in `model.blocks`, and give it an optimizer."""
    if spec.kind == "floor":
        return FloorTrainer(model, precision, optimizer, lr)
    wrap = {"shardwise": _shardwise, "fsdp2": _fsdp2, "ddp": _ddp}[spec.kind]
    model = wrap(model, precision, spec.options)
    adamw = torch.optim.AdamW(model.parameters(), lr=lr, **OPTIMIZERS[optimizer])
    return Trainer(model, adamw, autocast=spec.kind == "ddp" and precision == "bf16")


def _shardwise(model: Any, precision: Precision, options: list[str]) -> nn.Module:
    from shardwise import MixedPrecisionPolicy, shard_model

    transport = options[0] if options else "auto"
    # None is full_shard with the root kept after forward: FSDP2's default too.
    strategy = options[1] if len(options) > 1 and options[1] != "full_shard" else None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return shard_model(
        model, mesh=mesh, strategy=strategy, transport=transport, mp_policy=policy, unit="auto"
    )


def _fsdp2(model: Any, precision: Precision, options: list[str]) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    settings: dict[str, Any] = {"mesh": mesh}
    if precision == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if options == ["keep"]:
        settings["reshard_after_forward"] = False
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def _ddp(model: nn.Module, precision: Precision, options: list[str]) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True)
