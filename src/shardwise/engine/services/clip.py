"""Gradients as users handle them: accumulate without reducing, clip by the global norm."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import foreach_mul_, foreach_norm
from shardwise.comm.exchange import groups_of_mesh, max_over, sum_over
from shardwise.engine.core.state import sharded_units, units_in
from shardwise.engine.guards.finite import check_norm
from shardwise.engine.mesh.rows import cuts_dim
from shardwise.engine.reproducible.norm import Rows, ordered_norm
from shardwise.engine.reproducible.order import order_of


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside add up gradients on this rank; the first backward after it reduces them all.

    Settings are put back also when the body raises. Nests.
    """
    units = sharded_units(model)
    before = [unit.settings.requires_sync for unit in units]
    for unit in units:
        unit.settings.requires_sync = False
    try:
        yield
    finally:
        for unit, requires_sync in zip(units, before, strict=True):
            unit.settings.requires_sync = requires_sync


def mark_dirty(model: nn.Module) -> None:
    """Tell the engine that shards were written behind its back (through numpy, or
    `.to_local().data`).

    Writes by torch operations on the parameters are seen without it.
    """
    for unit in units_in(model):
        unit.mark.count += 1


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`; any mix of sharded and
    plain parameters.

    Plain gradients count once (every rank is expected to hold the same). One small all-reduce per
    mesh axis that shards. In a `reproducible` run the order of all additions is fixed.

    Args:
        parameters: parameters, or one; those without a gradient are passed over.
        max_norm: upper bound of the norm.
        norm_type: p of the p-norm, positive; `inf` for the largest absolute entry.
        error_if_nonfinite: raise NonFiniteError (a RuntimeError), which names parameters and ranks,
            when the norm is nan or inf; on all ranks, before anything is scaled.

    Returns:
        The norm before clipping: a plain 0-dim float32 tensor, the same on all ranks.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, found {norm_type}")
    parameters = list(parameters)
    for p in parameters:
        if getattr(getattr(p, "_mark", None), "steps_in_backward", False):
            raise ValueError(
                "clip_grad_norm_: these parameters have stepped in the backward "
                "(step_in_backward), so no gradient is left to clip; call optimizer.step() after "
                "the backward instead, or do not clip"
            )
    held = [p for p in parameters if p.grad is not None]
    if not held:
        return torch.tensor(0.0)
    groups = _by_layout([p.grad for p in held])  # type: ignore[misc]
    order = next((o for p in held if (o := order_of(p)) is not None), None)
    if order is not None:
        total = ordered_norm([Rows.of(p, order.param_of(p)) for p in held], norm_type)
    else:
        total = _total_norm(groups, norm_type)
    if error_if_nonfinite:
        check_norm(total, parameters)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for locals_ in groups.values():
        for device in {t.device for t in locals_}:
            there = [t for t in locals_ if t.device == device]
            foreach_mul_(there, factor.to(device))
    return total


Layout = tuple[DeviceMesh, tuple[int, ...]] | None


def _by_layout(grads: list[torch.Tensor]) -> dict[Layout, list[torch.Tensor]]:
    """Local gradients by (mesh, dims that shard them); None for plain ones."""
    groups: dict[Layout, list[torch.Tensor]] = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            local = grad.to_local()
            dims = tuple(i for i, p in enumerate(grad.placements) if cuts_dim(p) is not None)
            if any(p.is_partial() for p in grad.placements):
                raise ValueError(
                    "clip_grad_norm_: a gradient is a partial sum; redistribute it before"
                )
            groups.setdefault((grad.device_mesh, dims), []).append(local)
        else:
            groups.setdefault(None, []).append(grad)
    return groups


def _total_norm(groups: dict[Layout, list[torch.Tensor]], norm_type: float) -> torch.Tensor:
    largest = math.isinf(norm_type)
    parts = []
    for layout, locals_ in groups.items():
        device = locals_[0].device if layout is None else _device_of(layout[0], locals_[0])
        part = _local_power(locals_, norm_type, device)
        if layout is not None:
            mesh, dims = layout
            over = max_over if largest else sum_over
            over(part, groups_of_mesh(mesh, dims), "all_reduce of the gradient norm")
        parts.append(part.to(groups[next(iter(groups))][0].device))
    stacked = torch.stack(parts)
    return stacked.max() if largest else stacked.sum() ** (1.0 / norm_type)


def _device_of(mesh: DeviceMesh, local: torch.Tensor) -> torch.device:
    """Collectives run where the mesh is, also when gradients are offloaded."""
    if local.device.type == mesh.device_type:
        return local.device
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


def _local_power(
    locals_: list[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Sum of |x|^p over this rank's parts (the largest |x| for inf), in float32."""
    parts = []
    for own in {t.device for t in locals_ if t.numel()}:
        there = [t for t in locals_ if t.numel() and t.device == own]
        norms = torch.stack([n.float() for n in foreach_norm(there, norm_type)])
        part = norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
        parts.append(part.to(device))  # offloaded gradients: one number moves, not one for each
    if not parts:
        return torch.zeros((), dtype=torch.float32, device=device)
    if len(parts) == 1:
        return parts[0]
    stacked = torch.stack(parts)
    return stacked.max() if math.isinf(norm_type) else stacked.sum()
