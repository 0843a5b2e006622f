"""Settings of a sharded module that users change by method: FSDP2's rare knobs, by its names."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardwise.engine.core.state import unit_of, units_in, units_of_modules
from shardwise.engine.services.wire_formats import check_no_wire
from shardwise.errors import UsageError


class UnitSettings:
    """Mixin of `FSDPModule`. Methods with `recurse` reach the modules below by default."""

    # -- settings --------------------------------------------------------------------------------
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for FSDP2's sake. Every backward ends with all its reductions delivered, so
        nothing depends on it.
        """

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """False: gradients add up on this rank, unreduced, until a backward with True."""
        for unit in units_in(self, recurse):
            unit.settings.requires_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False, on hybrid meshes: reduce over the shard axis only, and keep that sum for the next
        all-reduce.
        """
        for unit in units_in(self, recurse):
            unit.settings.requires_all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether gathered parameters are freed between forward and backward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward: expected a bool, found {reshard_after_forward!r}"
            )
        for unit in units_in(self, recurse):
            unit.settings.root_rule = False
            unit.settings.reshard_after_forward = reshard_after_forward
            unit.context.keeps_some |= not reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether gathered parameters are freed after a backward."""
        for unit in units_in(self, recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Units whose gathers are issued while this module's forward runs."""
        unit_of(self).forward_prefetch = [weakref.ref(u) for u in units_of_modules(modules)]

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Units whose gathers are issued while this module's backward runs."""
        unit_of(self).backward_prefetch = [weakref.ref(u) for u in units_of_modules(modules)]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor` instead of by the number of ranks: those of this
        module's unit, and of units below that were given none by a call of their own, whichever
        call came first.
        """
        if not factor > 0:
            raise ValueError(f"the divide factor must be positive, found {factor}")
        own = unit_of(self)
        own.settings.has_own_factor = True
        for unit in units_in(self, True):
            if unit is own or not unit.settings.has_own_factor:
                unit.settings.divide_by = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: the backward does not gather this module (its parameters are not needed for
        gradients).
        """
        unit_of(self).settings.unshard_in_backward = unshard_in_backward

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this unit by `comm`: FSDP2's `AllGather`, an object with
        `allocate(size, *, dtype, device)` and
        `__call__(output_tensor, input_tensor, group, async_op)`. Moves the unit to c10d.
        """
        check_no_wire(unit_of(self), "set_custom_all_gather")
        unit_of(self).use_custom_comm("all_gather", comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this unit by `comm`: FSDP2's `ReduceScatter`, an object with
        `allocate(size, *, dtype, device)` and
        `__call__(output_tensor, input_tensor, group, op, async_op)`. Moves the unit to c10d.
        """
        check_no_wire(unit_of(self), "set_custom_reduce_scatter")
        unit_of(self).use_custom_comm("reduce_scatter", comm)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Call `hook` with this unit's reduced gradients (flat, averaged, reduce dtype) before they
        are delivered; it may change them in place, e.g. to reduce them over further ranks.
        """
        unit = unit_of(self)
        if stream is not None and unit.mesh.replicate.size > 1:
            raise ValueError("stream cannot be set when using native HSDP")
        unit.settings.all_reduce_hook = hook

    def set_post_optim_event(self, event: Any) -> None:
        """The next gathers wait for `event`, and so does the compute stream, which they follow."""
        unit = unit_of(self)
        if event is not None and unit.streams.is_async:
            unit.streams.wait(event)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted for FSDP2's sake: reductions here are sums, scaled afterwards."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many reductions may be in flight, each with its packed gradients: one by default, so
        that its memory serves the next. Where reductions do not run beside computing it is one.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers: expected an int, found {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers: expected 1 or more, found {max_input_buffers}")
        for unit in units_in(self, recurse):
            unit.settings.max_reductions = max_input_buffers

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accepted for FSDP2's sake: unused parameters always take part here, with zeros."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over a communicator of their own, so that gathers do not wait for reductions that
        were issued before them. A collective. Off by default: on NCCL it costs the memory of
        another communicator. Shared memory has none.
        """
        for unit in units_in(self, recurse):
            unit.settings.separates_reductions = enable
            unit.tell_transport()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take staging from the memory that the process group's backend has registered, where it
        has some (NCCL's user buffers). Not together with custom collectives, which allocate by
        themselves.
        """
        self._check_own_comm("set_allocate_memory_from_process_group_for_comm")
        unit = unit_of(self)
        unit.settings.allocates_by_group = enable
        unit.tell_transport()

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Stage this unit's gathers in symmetric memory, in which NCCL gathers by copy engines. A
        collective. For CUDA; it has run on no GPU yet. Reductions are as before.
        """
        self._check_own_comm("set_symm_mem_for_comm")
        check_no_wire(unit_of(self), "set_symm_mem_for_comm")
        unit = unit_of(self)
        if unit.mesh.device.type != "cuda":
            raise UsageError(
                f"set_symm_mem_for_comm: the unit {unit.name!r} is on {unit.mesh.device.type}, and "
                "symmetric memory is CUDA's; leave the call out"
            )
        unit.settings.symmetric_backend = backend
        unit.tell_transport()

    def _check_own_comm(self, method: str) -> None:
        unit = unit_of(self)
        for kind, comm in unit.custom_comms.items():
            raise UsageError(
                f"{method}: cannot be called on the unit {unit.name!r} when its "
                f"{kind.replace('_', ' ')} comm is custom: {type(comm).__name__}, which allocates "
                f"by itself; leave out this call or set_custom_{kind}"
            )
