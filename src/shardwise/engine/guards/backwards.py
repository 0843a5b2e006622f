"""Around every backward: what hooks on tensors cannot tell.

Hooks tell of a backward that has reached a unit. Every backward that Python starts, by whatever
function, passes here as well:

flags       `requires_grad` as it is when a backward starts holds for it, as in a plain model,
            whatever was switched since the forward, on whatever form
inputs      gradients that are asked for a sharded parameter are those of its gathered form, which
            is what the graph knows. `backward(inputs=...)` brings them to `.grad`, reduced;
            `torch.autograd.grad` would hand out what this rank alone has, so it is refused
openings    a graph that enters a unit other than by its outputs (an activation that was kept
            inside, a forward that an exception interrupted): the unit is gathered at the first
            node. The graph is looked at from the loss to the nearest outputs of units
failure     an exception passes through no hook. All contexts that took part go to rest at once, so
            that whoever looks at the model then, or writes to it, finds shards
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from shardwise._torch_compat import (
    around_backwards,
    functorch_transform,
    graph_task,
    leaf_of,
    written_since,
)
from shardwise.engine.core.backward import is_to_end
from shardwise.engine.core.context import Context, contexts, output_at
from shardwise.engine.core.guests import take_back
from shardwise.engine.core.parameter import ShardedParam, home_of
from shardwise.engine.core.unit import Unit
from shardwise.errors import EngineError

_grads = attrgetter("gradients.buckets")
_INPUTS = 3  # the place of `inputs` among the arguments of autograd's engine
_running = 0  # backwards, on all threads, those inside of others not counted


@functools.cache
def watch_backwards() -> None:
    """From now on. Once in a process."""
    around_backwards(_run)


def _run(run: Callable[..., Any], outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """One backward; `args` are those of autograd's engine."""
    global _running  # noqa: PLW0603 - autograd's engine is one for the process
    live, is_inner = contexts(), graph_task() is not None
    for context in () if is_inner else live:
        for grads in chain.from_iterable(map(_grads, context.units)):
            grads.arrivals.watch_again(grads)
            if grads.state.left:
                take_back(grads.state)
    if len(args) > _INPUTS and args[_INPUTS]:
        inputs = _in_graph(outputs, args[_INPUTS], accumulates=kwargs["accumulate_grad"])
        args = (*args[:_INPUTS], inputs, *args[_INPUTS + 1 :])
    if is_inner or not live:
        return run(outputs, *args, **kwargs)
    hooks = _gather_openings(outputs) if functorch_transform() is None else []
    _running += 1
    try:
        return run(outputs, *args, **kwargs)
    except BaseException as error:
        named = _named(error, outputs, live)
        _put_to_rest(live)
        if named is None:
            raise
        raise named from error
    finally:
        _running -= 1
        for hook in hooks:
            hook.remove()


def _put_to_rest(live: list[Context]) -> None:
    """What the backward that failed has left half done. A backward on another thread goes on. Where
    one is still to come, its own hooks gather again what a forward has kept for it.
    """
    for context in live:
        backward = context.backward
        if backward is None:
            for unit in context.units if context.order and not context.depth else ():
                unit.show_shards()
        elif _running == 1 or not is_to_end(backward.first_task):
            context.abandon()


# -- gradients for parameters --------------------------------------------------------------------
def _in_graph(outputs: Sequence[Any], inputs: Any, *, accumulates: bool) -> tuple[Any, ...]:
    """`inputs` with full parameters beside sharded ones, where those are what the graph holds."""
    params = [p for t in inputs if isinstance(t, torch.Tensor) and (p := _managed(t)) is not None]
    if not params:
        return tuple(inputs)
    if accumulates:
        given = {id(t) for t in inputs}
        forms = (form for p in params for form in (p.full, p.sharded))
        more = (f for f in forms if f is not None and f.requires_grad and id(f) not in given)
        return (*inputs, *dict.fromkeys(more))
    reached = {param for _, param in _params_in(_graph(outputs))}
    outside = [p for p in params if p in reached and not p.unit().context.depth]
    if outside:
        names = ", ".join(p.name for p in outside[:8]) + (" ..." if len(outside) > 8 else "")
        raise NotImplementedError(
            f"torch.autograd.grad for sharded parameters ({names}): it would return what this rank "
            "alone computed, for gathered parameters that are released again. Call "
            "loss.backward(inputs=[...]), or backward(), and read .grad, which is reduced over the "
            "ranks; for gradients of gradients, run torch.func.functional_call on whole tensors "
            "(parameter.full_tensor()) and ask for theirs"
        )
    return tuple(inputs)


def _managed(tensor: torch.Tensor) -> ShardedParam | None:
    param = home_of(tensor)
    return param if param is not None and param.is_form(tensor) else None


# -- graphs that enter units other than by their outputs -----------------------------------------
def _gather_openings(outputs: Sequence[Any]) -> list[Any]:
    """Hooks on nodes that need parameters of a unit whose output does not lead to them. Looked for
    as far as the outputs of innermost units; outer units were gathered by then.
    """
    passed: set[Any] = set()

    def is_passed(node: Any) -> bool:
        unit, is_innermost = output_at(node)
        if unit is not None and not is_innermost:
            passed.add(unit)
        return not is_innermost

    graph = _graph(outputs, is_passed)
    hooks = []
    for leaf, param in _params_in(graph):
        unit = param.unit()
        if unit is not None and unit.ref not in passed and not unit.keeps_between_steps:
            gather = functools.partial(_gather, unit)
            hooks += [node.register_prehook(gather) for node in _users(graph, leaf)]
    return hooks


def _gather(unit: Unit, _grads: Any) -> None:
    if not unit.copy.is_there:
        unit.context.pre_backward(unit)


def _users(graph: Graph, leaf: Any) -> list[Any]:
    """Nodes that may have saved a leaf, or a view of it: a view's node leads to one other."""
    users, waiting = [], [leaf]
    while waiting:
        for node in graph[waiting.pop()]:
            users.append(node)
            if len(node.next_functions) == 1:
                waiting.append(node)
    return users


Graph = dict[Any, list[Any]]  # nodes, with those that lead to them


def _graph(outputs: Sequence[Any], is_passed: Callable[[Any], bool] = lambda _: True) -> Graph:
    """What outputs reach, without what is behind nodes that are not passed."""
    roots = (t.grad_fn if isinstance(t, torch.Tensor) else t.node for t in outputs)
    graph: Graph = {node: [] for node in roots if node is not None}
    waiting = list(graph)
    while waiting:
        node = waiting.pop()
        for behind, _ in node.next_functions if is_passed(node) else ():
            if behind is None:
                continue
            if behind not in graph:
                graph[behind] = []
                waiting.append(behind)
            graph[behind].append(node)
    return graph


def _params_in(graph: Graph) -> Iterator[tuple[Any, ShardedParam]]:
    """The leaves of a graph that are gathered parameters."""
    for node in graph:
        leaf = leaf_of(node)
        param = None if leaf is None else home_of(leaf)
        if param is not None and param.full is leaf:
            yield node, param


# -- an error that names the unit ----------------------------------------------------------------
def _named(error: BaseException, outputs: Sequence[Any], live: list[Context]) -> EngineError | None:
    """In place of autograd's word on versions, where it means a parameter of ours."""
    found = written_since(error)
    if found is None:
        return None
    params = [
        param
        for unit in chain.from_iterable(context.units for context in live)
        for param in unit.params
        if param.full is not None
        and (param.full.numel(), param.full._version) == found
        and _is_entered(unit, param, outputs)
    ]
    return EngineError(_text(params)) if params else None


def _is_entered(unit: Unit, param: ShardedParam, outputs: Sequence[Any]) -> bool:
    """Whether a graph reaches a parameter past the outputs of its unit, or the unit is gathered."""
    graph = _graph(outputs, lambda node: output_at(node)[0] is not unit.ref)
    return unit.copy.is_there or any(found is param for _, found in _params_in(graph))


def _text(params: list[ShardedParam]) -> str:
    units = ", ".join(repr(name) for name in dict.fromkeys(p.unit().name for p in params))
    names = ", ".join(p.name for p in params[:8]) + (" ..." if len(params) > 8 else "")
    return (
        f"unit {units}: this backward needs gathered parameters ({names}) as its forward used "
        "them, and they were released or written since. Either the loss hangs on an activation "
        "that was kept from inside of the unit, or on a forward that was abandoned (an exception "
        "interrupted it), or the parameters were written between forward and backward. Return the "
        "activation from the unit's forward and use its output, keep the unit gathered "
        "(reshard_after_forward=False, strategy='shard_grad_op'), or write behind the backward"
    )
