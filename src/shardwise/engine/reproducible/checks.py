"""What would break the promise of a reproducible run, found before its first step.

Each finding names the thing and the remedy; all are raised together. The list of optimizers holds
those whose step was measured to give the same bits however a parameter is cut
(tests/engine/test_reproducible.py): they work element by element.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch
import torch.nn as nn

from shardwise._torch_compat import post_accumulate_hooks, tensor_hooks
from shardwise.comm.exchange import gather_objects
from shardwise.engine.core.gradients import USUAL
from shardwise.engine.core.unit import Unit
from shardwise.engine.reproducible.order import SumOrder
from shardwise.engine.services.step_in_backward import steps_in_backward

ELEMENTWISE = frozenset(
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
)
_WHY_NOT = {
    "Adafactor": "factors second moments of whole matrices (OwnedOptimizer gives it these)",
    "LBFGS": "takes dot products over all parameters",
    "Muon": "orthogonalises whole matrices (OwnedOptimizer gives it these)",
    "SparseAdam": "expects sparse gradients, which a sharded parameter does not have",
}


def check_run(
    model: nn.Module,
    units: list[Unit],
    optimizer: torch.optim.Optimizer | None,
    settings: tuple[int, ...],
) -> None:
    """Raises ValueError with all that stands against a reproducible run of `model`."""
    if any(isinstance(unit.gradients.route, SumOrder) for unit in units):
        raise ValueError("this model is in a reproducible run already; leave that one first")
    found = [*_modules(model), *_units(units), *_optimizer(optimizer)]
    # An exchange comes last, so that ranks with findings of their own do not leave it waiting.
    found = found or [*_ranks(units[0], settings)]
    if found:
        text = "\n".join(f"- {line}" for line in found)
        raise ValueError(f"this run cannot be reproducible on any number of ranks:\n{text}")


def _modules(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, nn.SyncBatchNorm):
            yield f"{where}: takes statistics over all ranks; use a norm without statistics"
        elif getattr(module, "track_running_stats", False) and module.training:
            yield (
                f"{where}: its running statistics follow the batches of one rank; set "
                "track_running_stats=False, call eval() on it, or use LayerNorm or GroupNorm"
            )


def _units(units: list[Unit]) -> Iterator[str]:
    first = units[0].mesh
    for unit in units:
        mesh = unit.mesh
        if (mesh.shard.ranks, mesh.replicate.ranks) != (first.shard.ranks, first.replicate.ranks):
            yield f"unit {unit.name!r}: is on another mesh than {units[0].name!r}; use one mesh"
        elif mesh.spmd is not None and mesh.spmd.size() != mesh.world:
            yield (
                f"unit {unit.name!r}: its mesh {mesh.spmd.mesh_dim_names} has a dim without data "
                "parallelism (tensor parallel), over which partial products are summed. Use data "
                "parallel dims only"
            )
        yield from _settings(unit)
        yield from _buckets(unit)


def _settings(unit: Unit) -> Iterator[str]:
    name = unit.name
    if unit.settings.all_reduce_hook is not None:
        yield f"unit {name!r}: set_all_reduce_hook changes sums; take it away"
    if unit.gradients.route is not USUAL:
        yield f"unit {name!r}: is in a join(), which weighs gradients by rank; leave it first"
    if steps_in_backward(unit):
        yield f"unit {name!r}: step_in_backward leaves no gradients to sum; do without it"
    if unit.settings.divide_by is not None:
        yield (
            f"unit {name!r}: set_gradient_divide_factor has no meaning here; gradients are the "
            "mean over micro-batches"
        )
    if not unit.settings.requires_sync or not unit.settings.requires_all_reduce:
        yield f"unit {name!r}: gradient synchronisation is off; the run accumulates by itself"


def _buckets(unit: Unit) -> Iterator[str]:
    for bucket in unit.buckets:
        # Those of the unit, or whole on all of its ranks (parameters without dims).
        if bucket.mesh.world != unit.mesh.world or (
            bucket.mesh.shard.size not in (1, unit.mesh.shard.size)
        ):
            yield (
                f"{bucket.params[0].name}: is on another mesh than the rest of unit {unit.name!r}, "
                "so its gradients are sums over other ranks; use one mesh"
            )
        if not bucket.transport.sums_in_tree:
            yield (
                f"unit {unit.name!r}: transport {bucket.transport.name!r} cannot sum in tree "
                "order; use 'c10d' or 'shared_memory'"
            )
        wire = bucket.layout.wire
        if wire.shard.is_lossy or wire.replicate.is_lossy:
            yield (
                f"unit {unit.name!r}: wire={unit.plan.wire.text!r} rounds what travels, in blocks "
                "that depend on the number of ranks; leave it out"
            )
        for kind in unit.custom_comms:
            yield f"unit {unit.name!r}: set_custom_{kind}: sums go through the transport here"
        dtype = bucket.layout.reduce_dtype
        if dtype not in (torch.float32, torch.float64) and bucket.params:
            yield (
                f"{bucket.params[0].name}: gradients would be summed in {dtype}; set "
                "reduce_dtype=torch.float32 in MixedPrecisionPolicy"
            )
        for param in bucket.params:
            if unit.mesh.spmd is None and param.spread.mesh.size() != bucket.mesh.world:
                yield (
                    f"{param.name}: is a DTensor on other dims too (tensor parallel), over which "
                    "partial products are summed. Use data parallel dims only"
                )
            if tensor_hooks(param.sharded) or post_accumulate_hooks(param.sharded):
                yield f"{param.name}: has a gradient hook, which sees one rank's rows; remove it"


def _optimizer(optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    if optimizer is None or getattr(optimizer, "steps_whole", False):
        return
    optimizer = getattr(optimizer, "optimizer", optimizer)  # one around it computes with it
    name = type(optimizer).__name__
    own = type(optimizer).__module__.startswith("torch.optim")
    if not own or name not in ELEMENTWISE:
        why = _WHY_NOT.get(name, "is not known to work element by element")
        yield (
            f"optimizer {name}: {why}; use one of {', '.join(sorted(ELEMENTWISE))}, or pass no "
            "optimizer if you know that its step does not depend on how parameters are cut"
        )
        return
    for i, group in enumerate(optimizer.param_groups):
        on_cpu = any(p.device.type == "cpu" for p in group["params"])
        if group.get("fused") and on_cpu:
            yield (
                f"optimizer {name}, group {i}: fused=True rounds differently at the ends of a "
                "parameter on CPU, which depend on the cut; use foreach=True"
            )


def numerics_of(device: torch.device) -> dict[str, str]:
    """What the bits of a result depend on, beside the program and the data."""
    facts = {"torch": str(torch.__version__), "machine": platform.machine()}
    if device.type == "cpu":
        facts["cpu"] = torch.backends.cpu.get_cpu_capability()
        facts["threads"] = str(torch.get_num_threads())
    else:
        facts["device"] = torch.get_device_module(device.type).get_device_name(device)
    return facts


def _ranks(unit: Unit, settings: tuple[int, ...]) -> Iterator[str]:
    """Ranks that differ from this one in what bits depend on. A small exchange per axis."""
    own = {
        **numerics_of(unit.mesh.device),
        "(num_micro_batches, seed)": str(settings),
    }
    for axis in (unit.mesh.shard, unit.mesh.replicate):
        if axis.size == 1:
            continue
        everyone = gather_objects(own, axis.group, "what the bits depend on, of all ranks")
        for rank, other in zip(axis.ranks, everyone, strict=True):
            for key in own:
                if other[key] != everyone[0][key]:
                    yield (
                        f"{key} is {other[key]} on rank {rank}, {everyone[0][key]} on rank "
                        f"{axis.ranks[0]}; results depend on it, so make them equal"
                    )


def written_buffers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Identity and version of every buffer that is state: they change when somebody writes.

    Buffers that are no part of the state dict are caches (rotary tables that grow).
    """
    return {
        f"{prefix}.{name}".lstrip("."): (id(buffer), buffer._version)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
