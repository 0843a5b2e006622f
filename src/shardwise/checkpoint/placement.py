"""Which part of a tensor this rank holds, whoever sharded it: our tensors, torch's, plain ones.

A DTensor is cut along its mesh dims from left to right, each as torch.chunk cuts. What FSDP puts
over tensor parallelism is cut last although its mesh dim stands first; torch calls that placement
`_StridedShard`, and the part is one box there too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise._torch_compat import local_of
from shardwise.checkpoint.boxes import Box
from shardwise.errors import CheckpointError

_CUT_LAST = "_StridedShard"


def local_part(tensor: Tensor, name: str) -> tuple[Tensor, Box, int | None]:
    """What this rank stores of `tensor`, where that lies in the whole, and the dim that is cut."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), Box.whole(tensor.shape), None
    local = local_of(tensor).detach()
    start, size, dims = [0] * tensor.ndim, list(tensor.shape), []
    cuts = list(enumerate(tensor.placements))
    for mesh_dim, placement in sorted(cuts, key=lambda c: type(c[1]).__name__ == _CUT_LAST):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard) and type(placement).__name__ != _CUT_LAST:
            raise CheckpointError(
                f"{name}: a tensor placed as {placement} cannot be saved or loaded; "
                "redistribute it to Shard or Replicate first"
            )
        dim = placement.dim  # type: ignore[attr-defined]
        length = -(-size[dim] // tensor.device_mesh.size(mesh_dim))
        first = min(length * tensor.device_mesh.get_local_rank(mesh_dim), size[dim])
        start[dim] += first
        size[dim] = min(length, size[dim] - first)
        dims.append(dim)
    box = Box(tuple(start), tuple(size))
    if tuple(local.shape) != box.size:
        raise CheckpointError(
            f"{name}: this rank holds {tuple(local.shape)}, where {tensor.placements} of "
            f"{tuple(tensor.shape)} means {box.size}; own ways to cut are not known here"
        )
    return local, box, dims[0] if dims else None


def is_on_meta(tensor: Tensor) -> bool:
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).is_meta


def storage_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    flat = tensor.detach().reshape(-1)
    assert flat.is_contiguous() and flat.device.type == "cpu"
    return flat.view(torch.uint8).numpy().data
