"""Checks before anything is trained: what goes wrong without a word later is found now.

in fully_shard     weights and buffers that differ between ranks: found by checksums while full
                   tensors exist, and set to those of the mesh's first rank
at the first       parameters still on meta; trainable parameters that no unit owns, also in a
forward            model around the sharded module; tensors that nobody filled after to_empty()
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import (
    is_replicated,
    local_of,
    modules_running,
    post_accumulate_hooks,
    tensor_hooks,
)
from shardwise.comm.exchange import broadcast, gather_tensors
from shardwise.comm.transport import Axis
from shardwise.engine.mesh.axes import ShardMesh
from shardwise.engine.subclasses import inner_tensors

log = logging.getLogger("shardwise")

_COMPARED = "the weights of all ranks, to compare them"
_UNFILLED = "_shardwise_unfilled"
_TOLD = "_shardwise_told"
_INT_SENTINEL = -86  # what an unfilled integer buffer is set to; floats are set to NaN
_CHUNK = 4096  # words that one of the sums is of
_ROWS = 1024  # of them by one call, which takes 32 MiB: sums are of 64-bit words


# -- ranks that start from different weights -----------------------------------------------------
@torch.no_grad()
def synchronize(named: list[tuple[str, torch.Tensor]], mesh: ShardMesh) -> None:
    """Make `named` full tensors equal on all ranks of the mesh; those of its first rank win. Of
    DTensors (tensor parallel ones) the parts that lie alike.

    Costs one pass over the tensors and one small all-gather per axis; tensors are sent only when
    they differ.
    """
    tensors = [
        (n, inner)
        for n, t in named
        if not t.is_meta
        for inner in inner_tensors(local_of(t) if isinstance(t, DTensor) else t)
    ]
    if not tensors or mesh.world == 1:
        return
    for axis in (mesh.shard, mesh.replicate):
        if axis.size > 1:
            _synchronize_over(tensors, axis, mesh.device)


def _synchronize_over(
    tensors: list[tuple[str, torch.Tensor]], axis: Axis, device: torch.device
) -> None:
    # Tensors of one unit may lie on several devices.
    sums = torch.stack([checksum(t).to(device) for _, t in tensors])
    # A rank may build or read its model for long before it comes here: it is waited for, and named.
    everybody = gather_tensors(sums, axis.group, _COMPARED, limit_s=math.inf)
    differs = torch.stack([s != everybody[0] for s in everybody]).any(0).any(-1).tolist()
    different = [pair for pair, d in zip(tensors, differs, strict=True) if d]
    if not different:
        return
    names = ", ".join(n for n, _ in different[:8]) + (" ..." if len(different) > 8 else "")
    log.log(
        logging.WARNING if axis.rank == 0 else logging.DEBUG,
        "ranks %s held different values of %s; all take those of rank %d",
        list(axis.ranks),
        names,
        axis.ranks[0],
    )
    for _, t in different:
        moved = t.to(device).contiguous()
        broadcast(moved, axis.group, _COMPARED)
        t.copy_(moved)


def checksum(t: torch.Tensor) -> torch.Tensor:
    """Two int64 numbers of the bytes of a tensor: a plain sum, and one weighted by position."""
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
    words = flat[: flat.numel() // 4 * 4].view(torch.int32)
    parts = [flat[flat.numel() // 4 * 4 :].sum(dtype=torch.int64).view(1)]
    for block in words.split(_ROWS * _CHUNK):
        filled = block.numel() // _CHUNK * _CHUNK
        parts.append(block[:filled].view(-1, _CHUNK).sum(1, dtype=torch.int64))
        parts.append(block[filled:].sum(dtype=torch.int64).view(1))
    sums = torch.cat(parts)
    place = torch.arange(1, len(sums) + 1, device=sums.device)
    return torch.stack([sums.sum(), (sums * place).sum()])


# -- tensors that nobody filled ------------------------------------------------------------------
def meta_tensors(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """(holder, name) of buffers and parameters on meta, before an `_apply` that may give them
    memory.
    """
    return [
        (m, key)
        for m in module.modules()
        for held in (m._parameters, m._buffers)
        for key, tensor in held.items()
        if tensor is not None and tensor.is_meta
    ]


@torch.no_grad()
def mark_unfilled(candidates: list[tuple[nn.Module, str]]) -> None:
    """Fill tensors that `to_empty` has just given memory with values that cannot be meant."""
    for module, key in candidates:
        tensor = module._parameters.get(key)
        tensor = module._buffers.get(key) if tensor is None else tensor
        if tensor is None or tensor.is_meta:
            continue
        for local in inner_tensors(local_of(tensor) if isinstance(tensor, DTensor) else tensor):
            if local.dtype.is_floating_point or local.dtype.is_complex:
                local.fill_(float("nan"))
            elif local.dtype != torch.bool and local.dtype != torch.uint8:
                local.fill_(_INT_SENTINEL)
        module.__dict__.setdefault(_UNFILLED, set()).add(key)


def check_filled(root: nn.Module) -> None:
    """Raise for tensors that still hold what `mark_unfilled` put into them."""
    unfilled = []
    for name, module in root.named_modules():
        marked = module.__dict__.pop(_UNFILLED, ())
        for key in [k for k in (*module._parameters, *module._buffers) if k in marked]:
            tensor = module._parameters.get(key)
            tensor = module._buffers.get(key) if tensor is None else tensor
            if tensor is not None and _is_untouched(tensor):
                unfilled.append(f"{name}.{key}" if name else key)
    if unfilled:
        raise RuntimeError(
            f"never initialised after to_empty(): {', '.join(unfilled[:8])}"
            f"{' ...' if len(unfilled) > 8 else ''}; their memory holds no meaningful values. "
            "Initialise or load them before the first forward: call the module's "
            "reset_parameters(), or use shardwise.materialize(model), which calls it for you. A "
            "non-persistent buffer is in no state dict and must be computed"
        )


def _is_untouched(tensor: torch.Tensor) -> bool:
    inner = list(inner_tensors(local_of(tensor) if isinstance(tensor, DTensor) else tensor))
    return bool(inner) and all(holds_marks(local) for local in inner)


def holds_marks(local: torch.Tensor) -> bool:
    if not local.numel():
        return False
    if local.dtype.is_floating_point or local.dtype.is_complex:
        return bool(torch.isnan(local).all())
    if local.dtype in (torch.bool, torch.uint8):
        return False
    return bool((local == _INT_SENTINEL).all())


# -- parameters that no unit owns ----------------------------------------------------------------
def models_running(module: nn.Module) -> Iterator[nn.Module]:
    """Modules whose forward is on this thread's stack and that contain `module`, innermost first.

    A sharded module does not know its parents; the stack does, at the moment that matters.
    """
    seen: set[int] = set()
    for caller in modules_running():
        if id(caller) not in seen:
            seen.add(id(caller))
            if any(m is module for m in caller.modules()):
                yield caller


def check_owned(root: nn.Module, owned: set[int], ignored: set[int], data_ranks: set[int]) -> None:
    """Raise for trainable parameters, in `root` or in a model that is calling it, that are in no
    unit: their gradients would stay those of one rank. DTensors whose own mesh holds the
    `data_ranks` of the units reduce their gradients themselves. What DDP has (`replicate`), it
    reduces.
    """
    models = (root, *models_running(root))
    replicas = {m for model in models for m in model.modules() if is_replicated(m)}
    owned = owned | {id(p) for m in replicas for p in m.parameters()}
    for model in models:
        stray = [
            name
            for name, p in model.named_parameters()
            if p.requires_grad
            and id(p) not in owned
            and id(p) not in ignored
            and not (isinstance(p, DTensor) and data_ranks <= _ranks_of(p))
            and not hasattr(p, "_shardwise_home")
        ]
        if stray:
            raise RuntimeError(
                f"trainable parameters that no unit owns: {', '.join(stray[:8])}"
                f"{' ...' if len(stray) > 8 else ''}; their gradients would not be averaged over "
                f"the ranks. Call fully_shard on {type(model).__name__} as the last one (new "
                "adapters too), or pass them as ignored_params if you reduce their gradients "
                "yourself"
            )


def tell_ignored(root: nn.Module, ignored: set[int], data_ranks: set[int]) -> None:
    """Name, once, trainable parameters in `ignored_params` whose gradients nobody seems to reduce:
    they stay those of each rank. A hook on the parameter counts as somebody.
    """
    models = (root, *models_running(root))
    replicas = {m for model in models for m in model.modules() if is_replicated(m)}
    reduced = {id(p) for m in replicas for p in m.parameters()}
    names = []
    for name, p in root.named_parameters() if ignored and len(data_ranks) > 1 else ():
        if id(p) not in ignored or id(p) in reduced or not p.requires_grad or hasattr(p, _TOLD):
            continue
        is_spread = isinstance(p, DTensor) and data_ranks <= _ranks_of(p)
        if not (is_spread or tensor_hooks(p) or post_accumulate_hooks(p)):
            names.append(name)
            setattr(p, _TOLD, True)
    if names:
        log.warning(
            "trainable parameters in ignored_params: %s; their gradients stay those of each rank. "
            "Do not ignore them, freeze them, or reduce the gradients by a hook, as here: "
            "p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(world)))",
            ", ".join(names[:8]) + (" ..." if len(names) > 8 else ""),
        )


def _ranks_of(tensor: DTensor) -> set[int]:
    return set(tensor.device_mesh.mesh.flatten().tolist())
