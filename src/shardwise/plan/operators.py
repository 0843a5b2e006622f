"""What a forward and a backward compute, operator by operator: kinds, dtypes, and how much.

    product      matrix products, in floating point operations
    attention    and its backward: fused scaled dot products, in floating point operations
    elementwise  all others that move something, in bytes read and written
    view         what moves nothing: only its call costs

A dispatch mode sees each operator as the device would, recomputed ones and those of the loss
included; on fake tensors nothing is computed. What is looked up (embeddings, indices) counts by
what comes out, not by the table that it comes from.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwise._torch_compat import DispatchMode
from shardwise.engine.tensor.trees import tensors_in

_ATEN = torch.ops.aten
_FORWARD = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu,
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_cudnn_attention,
}
_BACKWARD = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward,
    _ATEN._scaled_dot_product_flash_attention_backward,
    _ATEN._scaled_dot_product_efficient_attention_backward,
    _ATEN._scaled_dot_product_cudnn_attention_backward,
}
# Of these only what comes out is touched.
_LOOKS_UP = {_ATEN.embedding, _ATEN.index, _ATEN.gather, _ATEN.index_select, _ATEN.nll_loss_forward}
_FILLS = {_ATEN.embedding_dense_backward, _ATEN.nll_loss_backward}
_PUTS = {_ATEN.index_put_, _ATEN._index_put_impl_, _ATEN.scatter_, _ATEN.scatter_add_}
_CALLS = {"prim", "profiler"}  # namespaces that compute nothing


class Operator(NamedTuple):
    """One call; `amount`: operations or bytes, by its kind; `moved`: bytes of a product too."""

    kind: str
    dtype: str
    amount: float
    moved: int = 0


Operators = Counter[Operator]


class Watched(DispatchMode):
    """Operators since the last `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._found: Operators = Counter()

    def take(self) -> Operators:
        found, self._found = self._found, Counter()
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace not in _CALLS:
            self._found[operator_of(func, args, kwargs, out)] += 1
        return out


def operator_of(func: Any, args: Any, kwargs: Any, out: Any) -> Operator:
    """What one call does."""
    ins, outs = list(tensors_in((args, kwargs))), list(tensors_in(out))
    packet = func.overloadpacket
    dtype = _dtype_of(outs or ins)
    if packet in _FORWARD or packet in _BACKWARD:
        return _attention(packet, args, kwargs, dtype)
    moved = sum(_nbytes(t) for t in (*ins, *outs))
    if packet is _ATEN.addmm_:  # as addmm
        packet = _ATEN.addmm
    if packet in flop_registry:
        operands = {key: value for key, value in kwargs.items() if key != "out"}
        flops = flop_registry[packet](*args, **operands, out_val=out)
        return Operator("product", dtype, float(flops), moved)
    written = sum(_nbytes(t) for t in outs)
    if packet in _LOOKS_UP:
        return Operator("elementwise", dtype, 2 * written)
    if packet in _FILLS:
        return Operator("elementwise", dtype, written)
    if packet in _PUTS:
        put = sum(_nbytes(t) for t in ins[1:])
        return Operator("elementwise", dtype, 2 * put)
    if not func._schema.is_mutable and _is_view(ins, outs):
        return Operator("view", "", 0)
    return Operator("elementwise", dtype, moved)


def _attention(packet: Any, args: Any, kwargs: Any, dtype: str) -> Operator:
    is_backward = packet in _BACKWARD
    query, key = (args[1], args[2]) if is_backward else (args[0], args[1])
    *batch, rows, width = query.shape
    for size in batch:
        rows *= size
    products = 5 if is_backward else 2
    flops = 2.0 * products * rows * key.shape[-2] * width
    words = [*args, *kwargs.values()]
    if any(word is True for word in words):  # causal: half of the scores are not computed
        flops /= 2
    return Operator("attention backward" if is_backward else "attention", dtype, flops)


def _is_view(ins: list[Tensor], outs: list[Tensor]) -> bool:
    held = {t.untyped_storage()._cdata for t in ins}
    return bool(outs) and all(t.untyped_storage()._cdata in held for t in outs)


def _nbytes(tensor: Tensor) -> int:
    """Without what an expanded tensor repeats."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride or size == 0 else 1
    return numel * tensor.itemsize


def _dtype_of(tensors: list[Tensor]) -> str:
    for tensor in tensors:
        if tensor.is_floating_point():
            return "float32" if tensor.itemsize > 2 else "bfloat16"
    return "float32"
