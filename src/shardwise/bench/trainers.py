"""An engine behind one call, `step(batches) -> loss`: ours, the floor, and what all have in common.

A step is, for each micro-batch, forward and backward of loss / (number of micro-batches), then the
optimizer and `zero_grad(set_to_none=True)`. The optimizer is torch's AdamW with the same
implementation for all. The peers are in peers/.

bf16 means bf16 computation over fp32 weights with fp32 sums of gradients. The floor's rank then
holds a bf16 model and fp32 masters of its 1/N: it widens 1/N of the gradients, and rounds 1/N of
the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.bench.engines import STRATEGIES, EngineSpec
from shardwise.bench.traffic import Traffic, count_collectives, count_ours
from shardwise.bench.user import checked_loss
from shardwise.bench.workload import Batch, Precision
from shardwise.comm.choose import names
from shardwise.engine.services.grouping import choose_units
from shardwise.errors import ConfigError
from shardwise.layout import Wire

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is given."""

    spec: EngineSpec
    model: nn.Module
    precision: Precision
    num_micro_batches: int
    unit: str | int | tuple[str, ...]
    optimizer: str
    lr: float

    @property
    def is_bf16(self) -> bool:
        return self.precision == "bf16"

    def units(self) -> list[nn.Module]:
        """The modules that become units, innermost first; the root is not among them. Peers make
        one unit of each, also of small ones that shardwise puts together."""
        unit = list(self.unit) if isinstance(self.unit, tuple) else self.unit
        groups = choose_units(self.model, unit)
        return [self.model.get_submodule(name) for group in groups for name in group]

    def compile_units(self) -> None:
        """Compile the forward of each unit, where the engine's options ask for it."""
        if "compile" in self.spec.options:
            for module in self.units():
                module.compile()

    def adamw(self, params: Any) -> torch.optim.Optimizer:
        trained = [p for p in params if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, **OPTIMIZERS[self.optimizer])


class AnyTrainer(Protocol):
    """What a rank process drives."""

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """One optimizer step; the loss, a mean over the micro-batches."""
        ...

    def traffic(self, step: Callable[[], object]) -> Traffic:
        """What one call of `step` communicates."""
        ...


class Trainer:
    """A model, its optimizer, one step. `around(is_last)` is entered for each micro-batch."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        around: Callable[[bool], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._around = around or (lambda is_last: contextlib.nullcontext())

    def step(self, batches: Sequence[Batch]) -> Tensor:
        total = torch.zeros(())
        for number, batch in enumerate(batches, 1):
            with self._around(number == len(batches)):
                loss = checked_loss(self.forward(batch)) / len(batches)
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def forward(self, batch: Batch) -> Any:
        return batch.loss_of(self.model)

    def traffic(self, step: Callable[[], object]) -> Traffic:
        return count_collectives(step)


class OurTrainer(Trainer):
    """shardwise; what moves is read from its events, also where no collective is issued."""

    def traffic(self, step: Callable[[], object]) -> Traffic:
        return count_ours(self.model, step)


class AutocastTrainer(Trainer):
    """For engines without a mixed precision of their own."""

    def forward(self, batch: Batch) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return batch.loss_of(self.model)


class FloorTrainer:
    """No communication; rank r steps over row block r of every parameter."""

    def __init__(self, setup: Setup) -> None:
        self.model, self._bf16 = setup.model, setup.is_bf16
        setup.compile_units()
        self._parts: list[tuple[nn.Parameter, Tensor, int, int]] = []
        rank, world = dist.get_rank(), dist.get_world_size()
        for param in self.model.parameters():
            if not param.requires_grad:
                continue
            num_rows = param.shape[0] if param.dim() else 0  # a scalar has nothing to cut
            rows = -(-num_rows // world)
            start = min(rank * rows, num_rows)
            size = min(rows, num_rows - start)
            own = param.detach().narrow(0, start, size) if param.dim() else param.detach()
            master = own.clone() if self._bf16 else own
            self._parts.append((param, nn.Parameter(master), start, size))
        if self._bf16:
            self.model.to(torch.bfloat16)
        self.optimizer = setup.adamw([master for _, master, _, _ in self._parts])

    def step(self, batches: Sequence[Batch]) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            batch = batch.cast(torch.bfloat16) if self._bf16 else batch
            loss = checked_loss(batch.loss_of(self.model)) / len(batches)
            loss.backward()
            total += loss.detach()
        for param, master, start, size in self._parts:
            if param.grad is not None:
                part = param.grad.narrow(0, start, size) if param.dim() else param.grad
                master.grad = part.to(master.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for param, master, start, size in self._parts:
                if self._bf16:
                    own = param.narrow(0, start, size) if param.dim() else param
                    own.copy_(master)
                param.grad = None
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def traffic(self, step: Callable[[], object]) -> Traffic:
        return count_collectives(step)


# kind -> module of peers/ with `make(setup) -> trainer`
_PEERS = {
    "fsdp2": "fsdp2",
    "fsdp1": "fsdp1",
    "ddp": "ddp",
    "deepspeed": "deepspeed",
    "megatron_fsdp": "megatron",
    "fairscale": "fairscale",
}


def make_trainer(setup: Setup) -> AnyTrainer:
    """Shard or wrap the model of `setup`, and give it an optimizer."""
    if setup.spec.kind == "floor":
        return FloorTrainer(setup)
    if setup.spec.kind == "shardwise":
        return _shardwise(setup)
    return import_module(f"shardwise.bench.peers.{_PEERS[setup.spec.kind]}").make(setup)


def mesh_for(strategy: str, engine: str) -> DeviceMesh:
    """All ranks on one axis; two replicas for strategies that take both."""
    from shardwise.layout import strategy_named

    world = dist.get_world_size()
    if not strategy_named(strategy).is_hybrid:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    if world % 2:
        raise ConfigError(f"{engine}: two replicas cannot share {world} ranks evenly")
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


def _wire_of(spec: EngineSpec) -> Wire:
    """How weights and gradients travel, by the engine's options."""

    def of(what: str) -> str:
        chosen = (o.removeprefix(f"{what}_") for o in spec.options if o.startswith(what))
        return next(chosen, "exact")

    host_ranks = dist.get_world_size() // 2 if "by_hosts" in spec.options else 0
    return Wire(gather=of("gather"), reduce=of("reduce"), host_ranks=host_ranks)


def _shardwise(setup: Setup) -> Trainer:
    from shardwise import MixedPrecisionPolicy, no_sync, shard_model, step_in_backward

    spec = setup.spec
    setup.compile_units()
    # None is what the mesh is for, with the root kept after forward: FSDP2's default too.
    strategy = spec.one_of(STRATEGIES, "full_shard")
    policy = MixedPrecisionPolicy()
    if setup.is_bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = shard_model(
        setup.model,
        mesh=mesh_for(strategy, spec.name),
        strategy=None if strategy in ("full_shard", "hybrid_shard") else strategy,
        transport=spec.one_of(names(), "auto"),
        mp_policy=policy,
        unit=list(setup.unit) if isinstance(setup.unit, tuple) else setup.unit,
        wire=_wire_of(spec),
        reshard_after_forward=False if "keep" in spec.options else None,
    )

    def around(is_last: bool) -> AbstractContextManager[Any]:
        if "last" in spec.options and not is_last:
            return no_sync(model)
        return contextlib.nullcontext()

    optimizer = setup.adamw(model.parameters())
    if "in_backward" in spec.options:
        if setup.num_micro_batches > 1 and "last" not in spec.options:
            raise ConfigError(f"{spec.name}: each micro-batch would step; add the option last")
        step_in_backward(model, optimizer)
    return OurTrainer(model, optimizer, around)
