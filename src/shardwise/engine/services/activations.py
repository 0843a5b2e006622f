"""What a unit does with the activations that its backward needs.

    keep        they stay where autograd saves them
    recompute   only the unit's inputs stay; its forward runs again in the backward, inside the
                unit, so that parameters are gathered twice a step as without it
    selective   the same, but results of matrix products and attention stay: recomputing what is
                left costs little (Korthikanti et al. 2022, arXiv 2205.05198)
    + offload   what stays moves to host memory and comes back in the backward. On the compute
                stream: copies are not overlapped

Gathered parameters that autograd saves are no activations: they are never copied, since the engine
gathers them again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardwise.errors import EngineError

if TYPE_CHECKING:
    from shardwise.engine.core.unit import Unit

KINDS = ("keep", "recompute", "selective")
OFFLOADED_FROM_BYTES = 2**16  # smaller ones are not worth a copy of their own
_KEPT_RESULTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


@dataclass(frozen=True, slots=True)
class Activations:
    """See the module docstring."""

    kind: str = "keep"
    offload: bool = False

    @classmethod
    def named(cls, checkpointing: bool | str, offload: bool) -> Activations:
        """From the arguments of `shard_model`."""
        kind = {False: "keep", True: "recompute", "full": "recompute"}.get(
            checkpointing, checkpointing
        )
        if kind not in KINDS:
            raise ValueError(
                f"activation_checkpointing={checkpointing!r}: expected False, True ('full') or "
                "'selective'"
            )
        return cls(str(kind), offload)

    @property
    def is_plain(self) -> bool:
        return self.kind == "keep" and not self.offload

    def run(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`forward(*args, **kwargs)` with gradients on."""
        moved = OnHost(unit) if self.offload else contextlib.nullcontext()
        with moved:
            if self.kind == "keep":
                return forward(*args, **kwargs)
            options: dict[str, Any] = {}
            if self.kind == "selective":
                options["context_fn"] = functools.partial(
                    create_selective_checkpoint_contexts, _KEPT_RESULTS
                )
            call = functools.partial(forward, **kwargs)
            return checkpoint(call, *args, use_reentrant=False, **options)


class OnHost(torch.autograd.graph.saved_tensors_hooks):
    """Saved tensors move to host memory, gathered parameters and small tensors excepted."""

    def __init__(self, unit: Unit) -> None:
        name = unit.name
        gathered = {b.storage.data_ptr() for b in unit.buckets if b.bucket is not None}

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() in gathered:
                return tensor, tensor._version  # behind hooks autograd itself does not compare
            if tensor.numel() * tensor.itemsize < OFFLOADED_FROM_BYTES:
                return tensor
            pinned = not tensor.is_cpu
            host = torch.empty(
                tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned
            )
            host.copy_(tensor, non_blocking=pinned)
            return tensor.device, host

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            origin, copy = packed
            if isinstance(origin, torch.device):
                return copy.to(origin, non_blocking=copy.is_pinned())
            if origin._version != copy:
                raise EngineError(
                    f"{name}: its backward needs parameters that were released, or written since "
                    "the forward; run the forward again, and write to parameters at rest only"
                )
            return origin

        super().__init__(pack, unpack)
