"""`fully_shard`: shard a module's parameters in place.

Names, defaults and meaning of torch's `fully_shard` (torch.distributed.fsdp, FSDP2), plus
`strategy`, `transport` and `wire`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.choose import open_transport
from shardwise.comm.streams import streams_for
from shardwise.comm.transport import Transport
from shardwise.engine.core.build import Found, Plan, find_params, move_buffers, own_modules
from shardwise.engine.core.context import Context
from shardwise.engine.core.state import ModuleState, unit_of
from shardwise.engine.core.unit import Unit
from shardwise.engine.guards.audit import synchronize
from shardwise.engine.guards.backwards import watch_backwards
from shardwise.engine.guards.changes import watch_registrations
from shardwise.engine.guards.forms import watch_forms
from shardwise.engine.guards.optimizers import watch_optimizers
from shardwise.engine.mesh.axes import (
    ShardMesh,
    default_strategy,
    regrouped_strategy,
    resolve_mesh,
    strategy_for,
)
from shardwise.engine.mesh.placing import PlacementFn, Placer
from shardwise.engine.module import FSDPModule, swap_class
from shardwise.engine.rings import register_rings
from shardwise.engine.services.warm_pages import keep_pages_warm
from shardwise.engine.services.wire_formats import FORMATS, check_transport, transport_name
from shardwise.errors import UsageError
from shardwise.layout import (
    DataParallelMeshDims,
    Lifetime,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Strategy,
    Wire,
)


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    strategy: str | Strategy | None = None,
    transport: str | Transport = "auto",
    wire: Wire = Wire(),  # noqa: B008  (frozen)
) -> Any:
    """Shard the parameters of `module` that no earlier call has sharded; they become one unit.

    Call it bottom-up: on the blocks first, on the whole model last. Build the optimizer afterwards.

    Args:
        module: a module, or a list of modules whose parameters are to be gathered together.
        mesh: 1 dim (shard) or 2 dims (replicate, shard); all ranks in one dim by default.
            Parameters that are DTensors on other dims of its parent mesh (tensor parallel) keep
            those.
        reshard_after_forward: True frees gathered parameters after forward; False keeps them until
            the backward; an int keeps shards over that many ranks; None is True, except for the
            root's own unit, which is kept.
        shard_placement_fn: gives the `Shard(dim)` of a parameter, None for `Shard(0)`, or a
            `ShardPlacementResult` with a mesh of its own.
        mp_policy: dtypes of computation and reduction.
        offload_policy: `CPUOffloadPolicy()` keeps shards and sharded gradients in host memory.
        ignored_params: parameters to leave alone; their gradients are yours to reduce, by a hook
            on the parameter, say. Trainable ones without are named at the first forward.
        dp_mesh_dims: the data parallel dims of `mesh`, by name, where all parameters are DTensors
            over the whole of it.
        strategy: "full_shard", "hybrid_shard", "hybrid_full_optimizer", "shard_grad_op",
            "shard_optimizer", "no_shard" (aliases "zero3", ...). Excludes `reshard_after_forward`.
        transport: "auto", "c10d", "shared_memory", the name of one that was registered
            (`register_transport`), or an object that implements `Transport`.
        wire: formats in which weights and gradients travel, see `Wire`; "auto" is "c10d" then.

    Returns:
        The module (or list), its class swapped for one that is also an `FSDPModule`.

    Raises:
        ValueError: a setting that cannot be; the text names parameter, axis and remedy.
    """
    register_rings()
    modules = _checked_modules(module)
    default = default_strategy(mesh, dp_mesh_dims)
    chosen = strategy_for(strategy, default, reshard_after_forward)
    shard_mesh = resolve_mesh(mesh, chosen, dp_mesh_dims)
    if chosen.forward_world:
        chosen = regrouped_strategy(chosen, shard_mesh)
    wire.check(chosen, shard_mesh.shard.size, shard_mesh.replicate.size)
    transport = transport_name(wire, transport)
    keep_pages_warm(shard_mesh.device)
    plan = Plan(
        mesh=shard_mesh,
        transport=open_transport(
            transport, shard_mesh.shard, shard_mesh.replicate, shard_mesh.device
        ),
        policy=_policy(mp_policy),
        strategy=chosen,
        offload=offload_policy if hasattr(offload_policy, "pin_memory") else None,
        transport_name=transport,
        place_of=Placer(shard_placement_fn, shard_mesh, chosen),
        wire=wire,
    )
    check_transport(wire, plan.transport)
    ignored = frozenset(id(p) for p in ignored_params or ())
    found, ties = find_params(modules, set(ignored), plan.place_of, _is_sharded)
    for on_mesh, tensors in _full_tensors(modules, found, shard_mesh):
        synchronize(tensors, on_mesh)
    watch_optimizers()
    watch_registrations()
    watch_backwards()
    name = type(modules[0]).__name__
    unit = Unit(name, found, plan, streams_for(shard_mesh.device), len(modules), ignored)
    unit.tie(ties)
    move_buffers(modules, shard_mesh.device, _is_sharded)
    unit.settings.root_rule = (
        strategy is None and reshard_after_forward is None and chosen.lifetime is Lifetime.USE
    )
    context = Context()
    if wire.gather != "exact":
        context.moments.add(FORMATS)
    context.take_in([unit])
    for m in modules:
        swap_class(m, ModuleState(unit))
        watch_forms(m.modules())
    return module


def _full_tensors(
    modules: list[nn.Module], found: list[Found], mesh: ShardMesh
) -> list[tuple[ShardMesh, list[tuple[str, torch.Tensor]]]]:
    """What ranks must agree on, mesh by mesh: the parameters of this call, and buffers, which go
    with the parameters beside them.
    """
    groups = {mesh.axes: (mesh, [])}
    mesh_of: dict[int, ShardMesh] = {}
    for f in found:
        named: list[tuple[str, torch.Tensor]] = groups.setdefault(f.mesh.axes, (f.mesh, []))[1]
        named.append((f.name, f.param))
        mesh_of.update({id(parameters): f.mesh for parameters, _ in f.slots})
    for module in modules:
        for name, owner in own_modules(module, "", _is_sharded):
            on_mesh = mesh_of.get(id(owner._parameters), mesh)
            named = groups.setdefault(on_mesh.axes, (on_mesh, []))[1]
            named += [(f"{name}{k}", b) for k, b in owner._buffers.items() if b is not None]
    return list(groups.values())


def _checked_modules(module: Any) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard: expected a module or a list of modules, found an empty list")
    for m in modules:
        if not isinstance(m, nn.Module):
            raise ValueError(
                f"fully_shard: expected a module or a list of modules, found {type(m).__name__}"
            )
        if isinstance(m, (nn.ModuleList, nn.ModuleDict)) and not _has_forward(m):
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: "
                f"{type(m).__name__}; shard its "
                "entries, or pass list(module) to make them one unit"
            )
        if isinstance(m, FSDPModule):
            unit = unit_of(m)
            names = ", ".join(p.name for p in unit.params[:4]) or "no parameter of its own"
            raise UsageError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"{type(m).__name__} is sharded already, as the unit {unit.name!r} ({names}"
                f"{', ...' if len(unit.params) > 4 else ''}); call fully_shard on it once, "
                "bottom-up, or on a module around it for what is left"
            )
    return modules


def _has_forward(module: nn.Module) -> bool:
    """Whether somebody can call it: containers of torch leave `forward` to subclasses."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _policy(policy: Any) -> MixedPrecisionPolicy:
    """Ours, or one of torch's with the same fields."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    try:
        return MixedPrecisionPolicy(
            policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
        )
    except AttributeError:
        raise ValueError(
            f"mp_policy: expected a MixedPrecisionPolicy, found {type(policy).__name__}"
        ) from None


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)
