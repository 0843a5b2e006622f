"""Staging in memory that a backend knows: its collectives need no copies of their own.

GroupMemory       what the process group's backend has registered (NCCL's user buffers)
SymmetricGather   a pool of symmetric memory, in which NCCL gathers by copy engines. An all-gather
                  like that of a user (FSDP2's `set_custom_all_gather`)
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch_compat import all_gather_call, backend_of, symmetric_memory


class GroupMemory:
    """Torch's memory where the backend has none. Like a user's collective, of which this is the
    first half.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        backend = backend_of(self._group, device)
        if backend is not None and backend.supports_tensor_alloc(device):
            flat = backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)
            return flat.view(size)
        return torch.empty(size, dtype=dtype, device=device)


class SymmetricGather:
    """The pool gives the same memory again, so ranks meet over it (`rendezvous`) once."""

    def __init__(self, group: Any, backend: str) -> None:
        self._symmetric = symmetric_memory()
        self._symmetric.set_backend(backend)
        dist.barrier(group=group)  # the communicator has to be there before ranks meet

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        with _pool(self._symmetric, device):
            return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool
    ) -> Any:
        if self._symmetric.is_symm_mem_tensor(output_tensor):  # else gathered without staging
            self._symmetric.rendezvous(output_tensor, group=_name(group))
        return all_gather_call()(output_tensor, input_tensor, group=group, async_op=async_op)


def _name(group: Any) -> str:
    named: Any = dist.group.WORLD if group is None else group
    return named.group_name


def _pool(symmetric: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.use_mem_pool(symmetric.get_mem_pool(device))
