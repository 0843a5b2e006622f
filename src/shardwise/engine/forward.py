"""One call of a sharded module: gather, cast, run, hook the outputs, release.

The class swap (`module`) routes `__call__` through `run`, so that gathering comes before the
user's own pre-forward hooks and releasing behind their forward hooks, `module.compile()` compiles
the forward alone, and an exception passes through here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch_compat import graph_task
from shardwise.engine.activations import KEEP, Activations
from shardwise.engine.context import Context
from shardwise.engine.outputs import cast_floats, map_tensors, may_hide_tensors, tensors_in
from shardwise.engine.unit import OpenCall, Unit


def run(
    unit: Unit, activations: Activations, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """`forward(*args, **kwargs)` with the unit's parameters gathered."""
    context = unit.context
    outermost = context.begin_call(unit.name)
    try:
        in_backward = graph_task() is not None
        if in_backward:
            context.backward_pass().recomputing(unit)
        context.ran_forward(unit)
        unit.pre_forward()
        if not in_backward:
            context.prefetch.forward_of(unit, context)
        args, kwargs = _prepare_inputs(unit, outermost, args, kwargs)
        call = unit.open_call(in_backward)
        _watch_inputs(context, call, args, kwargs)
        if activations is KEEP or not torch.is_grad_enabled():
            out = forward(*args, **kwargs)
        else:
            out = activations.run(unit, forward, args, kwargs)
        if unit.policy.output_dtype is not None:
            out = cast_floats(out, unit.policy.output_dtype)
        watched = _watch_outputs(context, call, out)
        unit.hides_outputs = not watched and torch.is_grad_enabled() and may_hide_tensors(out)
        if watched and not in_backward:
            context.prefetch.ended(unit)
        unit.post_forward(in_backward)
    except BaseException:
        context.fail_call(outermost)
        raise
    context.end_call(unit.name, outermost)
    return out


def _prepare_inputs(unit: Unit, outermost: bool, args: Any, kwargs: Any) -> tuple[Any, Any]:
    device = unit.mesh.device
    if outermost and device.type != "cpu":

        def move(t: torch.Tensor) -> torch.Tensor:
            return t.to(device, non_blocking=True) if t.device != device else t

        args, kwargs = map_tensors(args, move), map_tensors(kwargs, move)
    dtype = unit.policy.param_dtype
    if dtype is not None and unit.policy.cast_forward_inputs:
        args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
    return args, kwargs


def _watch_inputs(context: Context, call: OpenCall, args: Any, kwargs: Any) -> None:
    """Release when the gradient of the input is complete; with several inputs only the end of the
    backward is sure.
    """
    if not torch.is_grad_enabled():
        return
    inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
    if len(inputs) == 1:
        inputs[0].register_hook(functools.partial(context.input_done, call))


def _watch_outputs(context: Context, call: OpenCall, out: Any) -> bool:
    """Gather again before the backward reaches this unit. True when one may come."""
    if not torch.is_grad_enabled():
        return False
    hook = functools.partial(context.pre_backward, call)
    watched = False
    for t in (out,) if isinstance(out, torch.Tensor) else tensors_in(out):
        if t.requires_grad:
            t.register_hook(hook)
            watched = True
    return watched
