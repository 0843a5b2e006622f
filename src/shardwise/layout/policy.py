"""Policies that users hand to `fully_shard`: frozen data with the names and defaults of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of computation and reduction; `None` means the parameter's own.

    Attributes:
        param_dtype: dtype of the gathered parameters, and so of forward and backward. reduce_dtype:
        dtype in which gradients are summed, over ranks and over micro-batches without sync
            (default: `param_dtype`).
        output_dtype: floating outputs of the unit's forward are cast to it.
        cast_forward_inputs: cast floating inputs of the unit's forward to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for key in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, key)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise ValueError(
                    f"MixedPrecisionPolicy.{key}: expected a torch.dtype, found {dtype!r}"
                )
            if not dtype.is_floating_point:
                raise ValueError(
                    f"MixedPrecisionPolicy.{key}: {dtype} is no floating dtype; "
                    "use e.g. torch.bfloat16"
                )

    def gather_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Dtype of the gathered copy of a parameter that is stored as `stored`."""
        return self.param_dtype if self.param_dtype and stored.is_floating_point else stored

    def sum_dtype(self, arrives: torch.dtype) -> torch.dtype:
        """Dtype in which gradients are summed that arrive, or are wanted, in `arrives`."""
        return self.reduce_dtype or arrives


def goes_with_stats(param: torch.Tensor, buffers: Mapping[str, torch.Tensor | None]) -> bool:
    """Whether a parameter stands beside running statistics (batch norm) of its dtype. Kernels want
    both in one dtype, and policies never touch buffers: so the parameter keeps its own.
    """
    stats = buffers.get("running_mean")
    return stats is not None and stats.dtype == param.dtype


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading; the base of the policies that do."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, sharded gradients and optimizer states live on the host, gathers go to the device."""

    pin_memory: bool = True
