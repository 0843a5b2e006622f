"""Which part of a tensor this rank holds, whoever sharded it: our tensors, torch's, plain ones.

A DTensor is cut along its mesh dims from left to right. What FSDP puts over tensor parallelism is
cut last although its mesh dim stands first; the part is one box there too (`engine.mesh.rows`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardwise._torch_compat import local_of
from shardwise.checkpoint.boxes import Box
from shardwise.engine.mesh.rows import cuts_dim, own_box
from shardwise.errors import CheckpointError


def local_part(tensor: Tensor, name: str) -> tuple[Tensor, Box, int | None]:
    """What this rank stores of `tensor`, where that lies in the whole, and the dim that is cut."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), Box.whole(tensor.shape), None
    local = local_of(tensor).detach()
    for placement in tensor.placements:
        if cuts_dim(placement) is None and not isinstance(placement, Replicate):
            raise CheckpointError(
                f"{name}: a tensor placed as {placement} cannot be saved or loaded; "
                "redistribute it to Shard or Replicate first"
            )
    box = Box(*own_box(tensor.shape, tensor.device_mesh, tensor.placements))
    dims = [dim for p in tensor.placements if (dim := cuts_dim(p)) is not None]
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
