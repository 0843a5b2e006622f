"""Optimizer state that is kept in fewer bits: codes, a scale for each block, a table for all.

    optim.<parameter>.<slot>~codes   as the parameter is cut; two to a byte in 4 bits, flat
    optim.<parameter>.<slot>~scale   one for each block of the flattened parameter
    optim.<parameter>.<slot>~qmap    what the codes mean, where they are no numbers themselves

That is `OptimState8bit`, `OptimState4bit` and `OptimStateFp8` of torchao.optim. Saved so, state
goes to any number of ranks bit for bit, provided that cuts split no block: `whole_blocks`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import is_wrapper_subclass, local_of, make_spec
from shardwise.checkpoint.placement import local_part
from shardwise.checkpoint.source import Source
from shardwise.engine.mesh.rows import RowShard, cuts_dim, own_box, rows_of
from shardwise.engine.tensor.shard_tensor import ShardTensor, wrap_like
from shardwise.errors import CheckpointError
from shardwise.layout import Cuts

MARK = "~"
CODES, SCALE, TABLE = "codes", "scale", "qmap"
_HOME = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}
_REMEDY = (
    "shard the model with shard_placement_fn=shardwise.whole_blocks(256, least=4096), and step "
    "with shardwise.local_view(optimizer)"
)


class CutAt(RowShard):
    """Cuts at given bounds: the elements that belong to another tensor's rows."""

    def __init__(self, dim: int, bounds: tuple[int, ...]) -> None:
        super().__init__(dim)
        self.bounds = bounds

    def cuts(self, rows: int, world: int) -> Cuts:
        return Cuts(self.bounds)


def base_of(slot: str) -> str:
    """The slot's own name: "exp_avg" of "exp_avg~codes"."""
    return slot.partition(MARK)[0]


def is_quantized(value: Any) -> bool:
    return isinstance(value, Tensor) and is_wrapper_subclass(_local(value))


def parts_of(key: str, value: Tensor) -> dict[str, Tensor]:
    """The tensors of one slot, by the keys under which they are saved.

    Raises:
        CheckpointError: another kind of tensor, or a rank's part splits a block.
    """
    local: Any = _local(value)
    kind = type(local).__name__
    if kind not in _HOME:
        raise CheckpointError(
            f"{key}: a {kind} cannot be saved; known are tensors of one value for each element, "
            f"and {', '.join(_HOME)} of torchao.optim"
        )
    is_4bit = kind == "OptimState4bit"
    found = {
        f"{key}{MARK}{CODES}": _flat(key, local.codes, value, 2)
        if is_4bit
        else wrap_like(local.codes, value),
        f"{key}{MARK}{SCALE}": _flat(key, local.scale, value, local.block_size),
    }
    if kind != "OptimStateFp8":
        found[f"{key}{MARK}{TABLE}"] = local.qmap
    return found


def is_empty_part(value: Any) -> bool:
    """Whether this rank has nothing of a slot, and so cannot know in which form others keep it."""
    return isinstance(value, DTensor) and value.numel() > 0 and not local_of(value).numel()


def check_forms(keys: Collection[str]) -> None:
    """A slot has one form on all ranks."""
    for key in sorted(keys):
        base, mark, _ = key.partition(MARK)
        if mark and base in keys:
            raise CheckpointError(
                f"{base}: some ranks keep it in fewer bits and others do not, since their parts "
                f"are too small for it or no whole blocks; {_REMEDY}"
            )


def read_slot(source: Source, key: str, parameter: Tensor) -> Tensor:
    """A slot from its saved parts, for this rank's part of the parameter; `key` is without mark."""
    codes_info = source.tensors.get(f"{key}{MARK}{CODES}")
    scale_info = source.tensors.get(f"{key}{MARK}{SCALE}")
    shape = tuple(parameter.shape)
    num = math.prod(shape)
    if codes_info is None or scale_info is None or not math.prod(scale_info.shape):
        raise CheckpointError(f"{source.path}: {key}: its codes or scales are missing")
    num_scales = math.prod(scale_info.shape)
    is_4bit = codes_info.shape != shape and codes_info.shape == (num // 2,)
    if num % num_scales or not (is_4bit or codes_info.shape == shape):
        raise CheckpointError(
            f"{source.path}: {key}: codes of {codes_info.shape} and {num_scales} scales are not "
            f"those of a parameter of {shape}"
        )
    local = _local(parameter)
    if not local.numel():
        empty = torch.zeros_like(local, requires_grad=False).detach()
        return wrap_like(empty, parameter)
    codes = _read(source, f"{key}{MARK}{CODES}", parameter, 2 if is_4bit else 1)
    inner = {CODES: codes if is_4bit else codes.view(local.shape)}
    inner[SCALE] = _read(source, f"{key}{MARK}{SCALE}", parameter, num // num_scales)
    if codes.dtype == torch.uint8:
        table = source.tensors.get(f"{key}{MARK}{TABLE}")
        if table is None:
            raise CheckpointError(f"{source.path}: {key}: the table of its codes is missing")
        inner[TABLE] = torch.empty(table.shape, dtype=table.dtype, device=local.device)
        read_key = f"{key}{MARK}{TABLE}"
        source.read(read_key, local_part(inner[TABLE], read_key)[1], inner[TABLE])
    return wrap_like(_made(key, inner, local, is_4bit), parameter)


def _made(key: str, inner: dict[str, Tensor], local: Tensor, is_4bit: bool) -> Any:
    name = "OptimStateFp8"
    if TABLE in inner:
        name = "OptimState4bit" if is_4bit else "OptimState8bit"
    try:
        kind = getattr(importlib.import_module(_HOME[name]), name)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{key}: was saved as torchao's {name}, which is not here ({error}); "
            "pip install torchao"
        ) from None
    if name == "OptimStateFp8":
        return kind(inner[CODES], inner[SCALE], dtype=local.dtype)
    signed = bool((inner[TABLE] < 0).any())
    tensors = (inner[CODES], inner[SCALE], inner[TABLE])
    if is_4bit:
        return kind(*tensors, signed, tuple(local.shape), dtype=local.dtype)
    return kind(*tensors, signed, dtype=local.dtype)


def _read(source: Source, key: str, parameter: Tensor, per: int) -> Tensor:
    """This rank's part of a flat tensor with one value for each `per` elements."""
    info, like = source.tensors[key], _local(parameter)
    if per == 1:
        part = torch.empty(like.shape, dtype=info.dtype, device=like.device)
        source.read(key, local_part(parameter, key)[1], part)
        return part
    part = torch.empty(like.numel() // per, dtype=info.dtype, device=like.device)
    laid = _flat(key, part, parameter, per)
    source.read(key, local_part(laid, key)[1], part)
    return part


def _flat(key: str, local: Tensor, like: Tensor, per: int) -> Tensor:
    """`local`, of one value for each `per` elements of the flattened `like`, as it lies there."""
    if not isinstance(like, DTensor):
        return local
    mesh, placements, bounds = like.device_mesh, [], None
    row = math.prod(like.shape[1:])
    for i, placement in enumerate(like.placements):
        dim = cuts_dim(placement)
        if dim is None:
            placements.append(placement)
            continue
        cuts = rows_of(placement, like.shape[0], mesh.size(i)) if dim == 0 else None
        if bounds is not None or cuts is None or any(b * row % per for b in cuts.bounds):
            raise CheckpointError(
                f"{key}: cut as {like.placements} over {tuple(like.shape)}, where a block of {per} "
                f"elements is on two ranks or in pieces; {_REMEDY}"
            )
        bounds = tuple(b * row // per for b in cuts.bounds)
        placements.append(CutAt(0, bounds))
    shape = torch.Size((like.numel() // per,))
    spec = make_spec(mesh, tuple(placements), shape, (1,), local.dtype)
    if bounds is not None and own_box(shape, mesh, tuple(placements))[1] != tuple(local.shape):
        raise CheckpointError(f"{key}: {tuple(local.shape)} values, where its cuts mean others")
    return ShardTensor.bare(local, spec)


def _local(value: Tensor) -> Tensor:
    return local_of(value) if isinstance(value, DTensor) else value
