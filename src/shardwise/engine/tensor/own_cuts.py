"""Operations on tensors that are cut in a way of their own (`mesh.rows.RowShard`): DTensor has no
rule for them. What works shard by shard does so; everything else computes with the whole, a gather.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwise._torch_compat import local_of, make_spec, new_dtensor
from shardwise.comm.exchange import gather_tensors
from shardwise.engine.mesh.rows import RowShard, own_box
from shardwise.engine.tensor.operators import OpInfo

_SHARD_BY_SHARD = frozenset("alias clone detach _to_copy".split())


def cuts_its_own_way(t: Any) -> bool:
    return isinstance(t, DTensor) and any(isinstance(p, RowShard) for p in t.placements)


def works_on_shards(func: Any, info: OpInfo) -> bool:
    """Operators whose result lies like their first argument, and that need no more than a shard."""
    return info.is_like or func._opname in _SHARD_BY_SHARD


def joined(t: DTensor) -> DTensor:
    """The whole of it on every rank, as a plain DTensor; a collective."""
    local, mesh = local_of(t).detach(), t.device_mesh
    cuts: list[tuple[int, RowShard, int]] = []  # mesh dim, placement, rows that it cuts
    rows = list(t.shape)
    for i, placement in enumerate(t.placements):
        if isinstance(placement, RowShard):
            cuts.append((i, placement, rows[placement.dim]))
            own = placement.cuts(rows[placement.dim], mesh.size(i))
            rows[placement.dim] = own.size(mesh.get_local_rank(i))
    for i, placement, num in reversed(cuts):  # the last one cut what those before it had left
        local = _join(local, num, placement, mesh.get_group(i))
    replicated = (Replicate(),) * mesh.ndim
    spec = make_spec(mesh, replicated, t.shape, local.stride(), t.dtype)
    return new_dtensor(DTensor, local, spec)


def _join(local: torch.Tensor, rows: int, placement: RowShard, group: Any) -> torch.Tensor:
    dim, cuts = placement.dim, placement.cuts(rows, group.size())
    sizes = [cuts.size(rank) for rank in range(cuts.world)]
    padded = local.new_zeros((*local.shape[:dim], max(sizes), *local.shape[dim + 1 :]))
    padded.narrow(dim, 0, local.size(dim)).copy_(local)
    parts = gather_tensors(padded, group, "all_gather of a tensor with cuts of its own")
    return torch.cat([p.narrow(dim, 0, n) for p, n in zip(parts, sizes, strict=True)], dim)


# -- torch.distributed.checkpoint ------------------------------------------------------------------
def chunk_of(t: DTensor) -> Any:
    """Where this rank's part lies, for torch's checkpoints."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    start, size = own_box(t.shape, t.device_mesh, t.placements)
    return ChunkStorageMetadata(offsets=torch.Size(start), sizes=torch.Size(size))


def write_item_of(name: str, t: DTensor) -> Any:
    """What torch's checkpoints write of it on this rank."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunk = chunk_of(t)
    properties = TensorProperties.create_from_tensor(local_of(t))
    data = TensorWriteData(chunk=chunk, properties=properties, size=t.size())
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
