"""Which rank writes which part, from what each rank says it holds.

A part that several ranks hold (replicas) is written by the one with the least to write so far.
Plain tensors are expected to be equal on all ranks; they are the lowest rank's.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.boxes import Box, tiling_problem
from shardwise.checkpoint.dtypes import dtype_name, dtype_of
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.names import MODEL
from shardwise.checkpoint.placement import is_on_meta, local_part
from shardwise.checkpoint.quantized import check_forms
from shardwise.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of one tensor."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    dim: int | None
    box: Box
    is_plain: bool

    @property
    def size_bytes(self) -> int:
        return self.box.numel * dtype_of(self.dtype, self.key).itemsize


@dataclass(frozen=True, slots=True)
class Plan:
    """All tensors, and the parts that each rank writes, in the order of its file."""

    tensors: dict[str, TensorInfo]
    parts: tuple[tuple[Part, ...], ...]


def parts_of(tensors: dict[str, Tensor], elsewhere: Container[str] = ()) -> list[Part]:
    """This rank's offer; of what is `elsewhere` the tensors have the layout only."""
    found = []
    for key, tensor in tensors.items():
        if is_on_meta(tensor) and key not in elsewhere:
            raise CheckpointError(f"{key}: is on the meta device; there is nothing to save yet")
        _, box, dim = local_part(tensor, key)
        name = dtype_name(tensor.dtype, key)
        is_plain = not isinstance(tensor, DTensor)
        found.append(Part(key, name, tuple(tensor.shape), dim, box, is_plain))
    return found


def make_plan(offers: Sequence[Sequence[Part]], *, of_stages: bool = False) -> Plan:
    """From the offers of all ranks; every rank computes the same."""
    if not of_stages:
        _check_names(offers)
    tensors: dict[str, TensorInfo] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    plain: set[str] = set()
    for rank, offer in enumerate(offers):
        for part in offer:
            info = TensorInfo(dtype_of(part.dtype, part.key), part.shape, part.dim)
            known = tensors.setdefault(part.key, info)
            if known != info:
                raise CheckpointError(
                    f"{part.key}: is {info.dtype} {info.shape} cut along {info.dim} on rank "
                    f"{rank}, {known.dtype} {known.shape} cut along {known.dim} on lower ranks"
                )
            holders.setdefault(part.key, {}).setdefault(part.box, []).append(rank)
            if part.is_plain:
                plain.add(part.key)
    check_forms(tensors.keys())
    by_place = {(rank, p.key): p for rank, offer in enumerate(offers) for p in offer}
    load, chosen = [0] * len(offers), [list[Part]() for _ in offers]
    for key in sorted(tensors):
        if problem := tiling_problem(tensors[key].shape, list(holders[key])):
            raise CheckpointError(f"{key}: the ranks together do not hold it whole: {problem}")
        for box in sorted(holders[key]):
            if not box.numel and tensors[key].size_bytes:
                continue  # an empty shard of a tensor with fewer rows than ranks
            ranks = holders[key][box]
            writer = ranks[0] if key in plain else min(ranks, key=lambda r: (load[r], r))
            part = by_place[writer, key]
            load[writer] += part.size_bytes
            chosen[writer].append(part)
    return Plan(tensors, tuple(tuple(parts) for parts in chosen))


def _check_names(offers: Sequence[Sequence[Part]]) -> None:
    """Parameter groups, ties and values are taken from rank 0, so its model must be everybody's."""
    named = [{p.key for p in offer if p.key.startswith(MODEL)} for offer in offers]
    for rank, names in enumerate(named):
        if apart := sorted(names ^ named[0]):
            raise CheckpointError(
                f"rank {rank} and rank 0 hold models with other names ({apart[0]} and "
                f"{len(apart) - 1} more are on one of the two only). Stages of a pipeline are "
                "saved and loaded by CheckpointManager(..., stages=True)"
            )
