"""One call of a sharded module: gather, cast, run, hook the outputs, release.

The class swap (`module`) routes `__call__` through `run`, so that gathering comes before the
user's own pre-forward hooks and releasing behind their forward hooks, `module.compile()` compiles
the forward alone, and an exception passes through here.

Two gradients are waited for in the backward. That of an output: the unit must be gathered before
it. That of the only input: behind it nothing inside the call is left to run. Where a call's output
is the next one's input, as in a stack of layers, one hook does for both.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwise._torch_compat import graph_task_id
from shardwise.engine.core.bucket import lies_over
from shardwise.engine.core.context import Call, Context, watch_output
from shardwise.engine.core.copy import UNSEEN
from shardwise.engine.core.state import Around
from shardwise.engine.core.unit import Unit

# What ends a walk through inputs and outputs. Lists, tuples, named tuples, dicts (and subclasses,
# transformers' ModelOutput), dataclasses and objects with a `__dict__` are walked.
_LEAVES = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MAX_DEPTH = 12


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


# -- tensors inside inputs and outputs -------------------------------------------------------------
def tensors_in(tree: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in `tree`, in order. Objects of unknown classes are searched too."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, _LEAVES) or depth > _MAX_DEPTH:
        return
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for item in tree:
            yield from tensors_in(item, depth + 1)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item, depth + 1)
    elif (
        hasattr(tree, "__dict__")
        and not isinstance(tree, (type, torch.nn.Module))
        and not callable(tree)
    ):
        yield from tensors_in(vars(tree), depth + 1)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):  # with slots
        for f in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, f.name), depth + 1)


def may_hide_tensors(out: Any) -> bool:
    """True for outputs without a visible tensor that may still hold one: closures, generators,
    objects with slots. No hook reaches those.
    """
    return not _holds_none(out) and next(tensors_in(out), None) is None


def _holds_none(out: Any) -> bool:
    if isinstance(out, (list, tuple, set, frozenset, dict)):
        items = out.values() if isinstance(out, dict) else out
        return all(_holds_none(item) for item in items)
    return isinstance(out, _LEAVES)


def map_tensors(tree: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`tree` with `fn` applied to its tensors; containers are rebuilt only when something in them
    changed.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, _LEAVES):
        return tree
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(item, fn) for item in tree]
        if all(a is b for a, b in zip(items, tree, strict=True)):
            return tree
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        return type(tree)(items)
    if isinstance(tree, dict):
        return _map_dict(tree, fn)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(tree, fn)
    return tree


def _map_dict(tree: dict[Any, Any], fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    items = {key: map_tensors(value, fn) for key, value in tree.items()}
    if all(items[key] is tree[key] for key in tree):
        return tree
    if type(tree) is dict:
        return items
    out = copy.copy(tree)
    for key, value in items.items():
        out[key] = value
    return out


def _map_dataclass(tree: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    out = tree
    for f in dataclasses.fields(tree):
        value = getattr(tree, f.name, None)
        mapped = map_tensors(value, fn)
        if mapped is not value:
            if out is tree:
                out = copy.copy(tree)
            object.__setattr__(out, f.name, mapped)  # frozen ones too: `out` is our own copy
    return out


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of `tree` in `dtype`."""

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t

    return map_tensors(tree, cast)
