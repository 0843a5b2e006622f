"""Which gradients are nan or inf, and on which ranks: found, and told to all of them.

The good case costs one norm per gradient (foreach) and one flag per mesh dim. Only when a rank has
found something do all ranks exchange which parameter on which rank it is; so all ranks raise, with
the same text. Sharded, tensor-parallel and plain gradients, several meshes, empty shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import foreach_norm
from shardwise.comm.exchange import groups_of_mesh, max_over
from shardwise.engine.core.state import units_in
from shardwise.errors import NonFiniteError

_SHOWN = 16
_NAN, _INF = 0, 1

Named = list[tuple[str, torch.Tensor]]


@torch.no_grad()
def check_finite(model: nn.Module) -> None:
    """Raise NonFiniteError on all ranks when a gradient of `model` holds nan or inf on any rank.

    The error names parameters and ranks; `error.where` holds them as a dict. All ranks call it, at
    the same place. Partial sums of an accumulation are reduced first, as by clipping.
    """
    named = [(n, p.grad) for n, p in _parameters(model) if p.grad is not None]
    check_gradients(named)


def _parameters(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """The registered form of each parameter, also of units that are gathered now."""
    registered = {id(p.full): p.sharded for unit in units_in(model) for p in unit.params}
    for name, param in model.named_parameters():
        yield name, registered.get(id(param), param)


@torch.no_grad()
def check_gradients(named: Named) -> None:
    """The same for gradients that the caller has named, alike on all ranks."""
    if _anywhere(not _all_finite([_local(grad) for _, grad in named]), _by_mesh(named)):
        raise found_error(named)


def check_norm(total: torch.Tensor, parameters: list[torch.Tensor]) -> None:
    """Raise when the norm of the gradients of `parameters` is nan or inf, on all ranks."""
    named = [
        (getattr(p, "_param_name", "") or f"parameter {i} of shape {tuple(p.shape)}", p.grad)
        for i, p in enumerate(parameters)
        if p.grad is not None
    ]
    # Asked even where ranks should have the same norm: a replica may be spoiled alone.
    if _anywhere(not math.isfinite(total.item()), _by_mesh(named)):
        raise found_error(named)


def _anywhere(bad: bool, groups: dict[DeviceMesh | None, Named]) -> bool:
    for mesh in groups:
        if mesh is not None:
            bad = bool(_over_mesh(torch.tensor([int(bad)]), mesh).item())
    return bad


def found_error(named: Named) -> NonFiniteError:
    """The error for gradients of which some are known not to be finite. All ranks call it."""
    where: dict[str, list[int]] = {}
    kinds: dict[str, set[str]] = {}
    groups = _by_mesh(named)
    first = next((mesh for mesh in groups if mesh is not None), None)
    for own_mesh, members in groups.items():
        mesh = own_mesh if own_mesh is not None else first  # plain: told to the others all the same
        for name, rank, kind in _locate(members, mesh):
            kinds.setdefault(name, set()).add(kind)
            if rank not in where.setdefault(name, []):
                where[name].append(rank)
    if not where:
        return NonFiniteError(
            "all gradients are finite, but their norm is not: it overflows float32. Look at the "
            "scale of the loss",
            where,
        )
    parts = [
        f"{name} ({' and '.join(sorted(kinds[name]))} on rank{'s' * (len(ranks) > 1)} "
        f"{', '.join(map(str, ranks))})"
        for name, ranks in where.items()
    ]
    shown = ", ".join(parts[:_SHOWN]) + (
        f" and {len(parts) - _SHOWN} more parameters" if len(parts) > _SHOWN else ""
    )
    return NonFiniteError(
        f"gradients are not finite: {shown}. Skip the step (zero_grad()), lower the learning rate, "
        "or look at the data of this step; a rank holds its part of the sum over all ranks",
        where,
    )


def _locate(members: Named, mesh: DeviceMesh | None) -> list[tuple[str, int, str]]:
    """(name, global rank, nan or inf) of everything that is not finite in a mesh."""
    ranks = [dist.get_rank() if dist.is_initialized() else 0]
    own = 0
    if mesh is not None:
        ranks = mesh.mesh.flatten().tolist()
        own = ranks.index(dist.get_rank())
    flags = torch.zeros(len(members), len(ranks), 2, dtype=torch.int32)
    for i, (_, grad) in enumerate(members):
        local = _local(grad)
        flags[i, own, _NAN] = int(local.isnan().any())
        flags[i, own, _INF] = int(local.isinf().any())
    if mesh is not None:
        flags = _over_mesh(flags, mesh)
    return [
        (members[i][0], ranks[r], ("nan", "inf")[kind]) for i, r, kind in flags.nonzero().tolist()
    ]


def _by_mesh(named: Named) -> dict[DeviceMesh | None, Named]:
    groups: dict[DeviceMesh | None, Named] = {}
    for name, grad in named:
        mesh = grad.device_mesh if isinstance(grad, DTensor) else None
        groups.setdefault(mesh, []).append((name, grad))
    return groups


def _local(grad: torch.Tensor) -> torch.Tensor:
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return local.coalesce().values() if local.is_sparse else local


def _all_finite(locals_: list[torch.Tensor]) -> bool:
    filled = [t for t in locals_ if t.numel()]
    for device in {t.device for t in filled}:
        there = [t for t in filled if t.device == device]
        largest = torch.stack([n.float() for n in foreach_norm(there, math.inf)]).sum()
        if not math.isfinite(largest.item()):
            return False
    return True


def _over_mesh(flags: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The largest of every entry over all ranks of a mesh."""
    flags = flags.to(mesh.device_type)
    max_over(flags, groups_of_mesh(mesh), "all_reduce of which gradients are not finite")
    return flags.cpu()
