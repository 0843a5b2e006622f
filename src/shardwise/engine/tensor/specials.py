"""Operators to which `ShardTensor` has an answer of its own: numbers that leave, random fills, full
plain tensors that are copied in, masks, gradients that a `GradScaler` looks at.

Each is `(func, args, kwargs) -> (done, result)`; one that is not done goes the usual way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwise._torch_compat import local_of, make_spec
from shardwise.comm.exchange import groups_of_mesh, max_over
from shardwise.engine.tensor import operators as rules
from shardwise.engine.tensor.shard_tensor import (
    ShardTensor,
    finished,
    local_or_self,
    own_part,
    settle,
    store,
    whole_of,
    wrap_like,
    written,
)


def _item(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    (t,) = args
    settle(args)
    if any(not p.is_replicate() for p in t.placements):
        t = t.redistribute(placements=[Replicate()] * t.device_mesh.ndim)
    return True, func(local_of(t))


def _stack(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Numbers of tensors on several meshes side by side, as clipping does with norms; DTensor
    takes one mesh. Finished numbers are the same everywhere, so the largest mesh may hold them.
    """
    numbers = args[0]
    if any(type(t) is not ShardTensor or t.ndim for t in numbers):
        return False, None
    meshes = {t.device_mesh: t.device_mesh.size() for t in numbers}
    if len(meshes) == 1:
        return False, None
    mesh = max(meshes, key=meshes.__getitem__)
    whole = func([local_of(finished(t)) for t in numbers])
    placements = (Replicate(),) * mesh.ndim
    spec = make_spec(mesh, placements, whole.shape, whole.stride(), whole.dtype)
    return True, ShardTensor(whole, spec)


def _random_fill(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Every rank draws the whole tensor and keeps its part: any world size draws the numbers of
    one process.
    """
    target = args[0]
    if type(target) is not ShardTensor or local_of(target).is_meta:
        return False, None
    local = local_of(target)
    whole = torch.empty(target.shape, dtype=target.dtype, device=local.device)
    func(whole, *args[1:], **kwargs)
    store(target, whole)
    return True, target


def _random_like(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    source = args[0]
    if type(source) is not ShardTensor or local_of(source).is_meta:
        return False, None
    dtype = kwargs.get("dtype") or source.dtype
    whole = torch.empty(source.shape, dtype=dtype, device=local_of(source).device)
    whole = func(whole, *args[1:], **kwargs)
    return True, wrap_like(own_part(whole, source).contiguous(), source)


def _copy(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`copy_` of a plain tensor of the full shape: every rank keeps its part."""
    target, source = args[0], args[1]
    if type(target) is not ShardTensor or isinstance(source, DTensor) or local_of(target).is_meta:
        return False, None
    if source.shape != target.shape:
        source = source.expand(target.shape)
    store(target, source)
    return True, target


def _set(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`set_` to a tensor of the same shape, by which parametrizations are removed: its values."""
    target, source = args
    if type(target) is not ShardTensor or source.shape != target.shape:
        return False, None
    target.copy_(source)
    return True, target


def _eye(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`nn.init.eye_`: every rank keeps its part of the unit matrix."""
    target = kwargs["out"]
    if type(target) is not ShardTensor or local_of(target).is_meta:
        return False, None
    store(target, torch.eye(*args, dtype=target.dtype, device=local_of(target).device))
    return True, target


def _masked_set(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`t[mask] = scalar` with a mask that lies like `t` (Rprop): every rank sets its own part.

    A tensor without dims is whole on every rank, and torch turns its mask into plain indices.
    """
    target, indices, values = args[0], args[1], args[2]
    if type(target) is not ShardTensor:
        return False, None
    masks = [i for i in indices if i is not None]
    plain = not any(isinstance(t, DTensor) for t in (*masks, values))
    if plain and all(p.is_replicate() for p in target.placements):
        settle(args)
        local_of(target).index_put_(indices, values)
        written(target)
        return True, target
    if plain and not local_of(target).is_meta:
        settle(args)
        whole = local_of(whole_of(target)).clone()
        whole.index_put_(indices, values, *args[3:])
        store(target, whole)
        return True, target
    if len(masks) != 1 or masks[0].dtype != torch.bool:
        return False, None
    if values.ndim or isinstance(values, DTensor) or masks[0].shape != target.shape:
        return False, None
    if not isinstance(masks[0], DTensor) or not rules.same_layout((target, masks[0])):
        return False, None
    settle(args)
    local_of(target).masked_fill_(local_of(masks[0]), values)
    written(target)
    return True, target


def _unscale(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """`GradScaler`: an inf on one rank makes all ranks of the mesh, replicas too, skip the step."""
    grads, found_inf, inv_scale = args
    settle((grads,))
    found = local_or_self(found_inf)
    func([local_or_self(g) for g in grads], found, local_or_self(inv_scale))
    for mesh in dict.fromkeys(g.device_mesh for g in grads if isinstance(g, DTensor)):
        max_over(found, groups_of_mesh(mesh), "all_reduce of whether gradients are finite")
    return True, None


_SPECIAL: dict[Any, rules.Special] = {
    torch.ops.aten._local_scalar_dense.default: _item,
    torch.ops.aten.copy_.default: _copy,
    torch.ops.aten.stack.default: _stack,
    torch.ops.aten.set_.source_Tensor: _set,
    torch.ops.aten.index_put_.default: _masked_set,
    torch.ops.aten.eye.m_out: _eye,
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    **dict.fromkeys(rules.RANDOM_FILLS, _random_fill),
    **dict.fromkeys(rules.RANDOM_LIKES, _random_like),
}

rules.SPECIAL.update(_SPECIAL)
