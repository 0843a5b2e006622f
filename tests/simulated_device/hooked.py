"""A parameter that is gathered in its own way: kept in fp32, sent in bf16, used in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

aten = torch.ops.aten
KEEP_THE_CLASS = (
    aten.detach.default,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten.slice.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten.clone.default,
    aten._to_copy.default,
)


class SentAsHalf(torch.Tensor):
    """A wrapper over one tensor."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        self = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device=values.device
        )
        self.values = values
        return self

    def __repr__(self, **_: Any) -> str:
        return f"SentAsHalf({tuple(self.shape)})"

    def __tensor_flatten__(self) -> Any:
        return ["values"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["values"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(cls, lambda t: t.values, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        if func is aten.copy_.default:
            return args[0]
        return cls(out) if func in KEEP_THE_CLASS else out

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.values.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        (sent,) = outputs
        if out is not None:
            out.copy_(sent)
            return None
        whole = sent.to(param_dtype)
        return whole, (whole,)
