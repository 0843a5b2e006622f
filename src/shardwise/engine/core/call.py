"""One call of a sharded module: gather, cast, run, hook the outputs, release.

The class swap (`module`) routes `__call__` through `run`, so that gathering comes before the
user's own pre-forward hooks and releasing behind their forward hooks, `module.compile()` compiles
the forward alone, and an exception passes through here.

Two gradients are waited for in the backward. That of an output: the unit must be gathered before
it. That of the only input: behind it nothing inside the call is left to run. Where a call's output
is the next one's input, as in a stack of layers, one hook does for both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch_compat import graph_task_id
from shardwise.engine.core.bucket import lies_over
from shardwise.engine.core.context import Call, Context, watch_output
from shardwise.engine.core.copy import UNSEEN
from shardwise.engine.core.state import Around
from shardwise.engine.core.unit import Unit
from shardwise.engine.tensor.trees import cast_floats, map_tensors, may_hide_tensors, tensors_in


def run(
    unit: Unit, around: Around | None, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """`forward(*args, **kwargs)` with the unit's parameters gathered."""
    context = unit.context
    outermost = context.begin_call(unit.name)
    try:
        in_backward = graph_task_id() != -1
        has_grad = torch.is_grad_enabled()
        if in_backward:
            context.running_backward().recomputing(unit)
        context.ran_forward(unit, is_awaited=has_grad and not in_backward)
        unit.pre_forward()
        if not in_backward:
            for tell in context.moments.computing:
                tell(unit)
        args, kwargs = _prepare_inputs(unit, outermost, args, kwargs)
        call = None
        if has_grad:
            # A recomputation is no call of its own: the first one's backward is under way.
            call = Call(unit, is_open=not in_backward)
            _watch_inputs(context, call, args, kwargs)
        if around is None or not has_grad:
            out = forward(*args, **kwargs)
        else:
            out = around(unit, forward, args, kwargs)
        if unit.policy.output_dtype is not None:
            out = cast_floats(out, unit.policy.output_dtype)
        out = _without_parameters(unit, out)
        if call is not None:
            watched = _watch_outputs(context, call, out)
            unit.copy.holds &= ~UNSEEN
            if not watched and may_hide_tensors(out):
                unit.copy.holds |= UNSEEN
            unit.is_awaited |= watched
            if watched and not in_backward:
                for tell in context.moments.computed:
                    tell(unit)
        unit.post_forward(in_backward)
    except BaseException:
        if unit.is_running and graph_task_id() != -1:
            # Torch ends a recomputation by an exception once it has what it needs.
            unit.post_forward(True)
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
        args = cast_floats(args, dtype)
        if kwargs:
            kwargs = cast_floats(kwargs, dtype)
    return args, kwargs


def _without_parameters(unit: Unit, out: Any) -> Any:
    """A weight that a module returns, or a view of one, lies in memory that is released now or
    later. It becomes a copy, which stays readable and takes its gradient to the weight.
    """
    if isinstance(out, torch.Tensor) and not out.is_leaf and out._base is None:
        return out  # computed, as usual
    addresses = unit.addresses()
    return map_tensors(out, lambda t: t.clone() if lies_over(t, addresses) else t)


def _watch_inputs(context: Context, call: Call, args: Any, kwargs: Any) -> None:
    """Release when the gradient of the input is complete; with several inputs only the end of the
    backward is sure.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        inputs = args if args[0].requires_grad else ()
    else:
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
    if len(inputs) != 1:
        return
    before = context.latest_call
    if before is not None and before.output is not None and before.output() is inputs[0]:
        before.followers.append(call)
    else:
        call.watch_input(inputs[0])


def _watch_outputs(context: Context, call: Call, out: Any) -> bool:
    """Gather again before the backward reaches this unit. True when one may come."""
    context.latest_call = None
    if isinstance(out, torch.Tensor):
        if out.requires_grad:
            watch_output(out, call)
            call.output = weakref.ref(out)
            context.latest_call = call
        return out.requires_grad
    watched = False
    for t in tensors_in(out):
        if t.requires_grad:
            watch_output(t, call)
            watched = True
    return watched
