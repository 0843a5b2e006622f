"""Facts about operators that `ShardTensor` needs, read from their schemas once: what they write,
return, and whether they work element by element (then they may run on the shards directly).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

aten = torch.ops.aten

# Asked of many tensors by one `map`, which stays in C.
_spec, _placements, _ndim = attrgetter("_spec"), attrgetter("placements"), attrgetter("ndim")


@dataclass(frozen=True, slots=True)
class OpInfo:
    """`writes`: positions of arguments that are written. `returns_written`: it gives back its
    first argument.
    """

    writes: tuple[int, ...]
    returns_written: bool
    returns_nothing: bool
    returns_view: bool
    elementwise: bool
    writes_grads_away: bool
    is_verdict: bool  # any, all: a partial verdict adds up wrongly when it is cast
    is_like: bool  # zeros_like, ...: lies like its first argument


# Base names of operators whose result at an element depends on that element of each operand alone.
_ELEMENTWISE = frozenset(
    "abs add addcdiv addcmul clamp clamp_max clamp_min copy div exp lerp log maximum minimum mul "
    "neg pow reciprocal "
    "rsqrt sign sqrt sub zero fill".split()
)
_FUSED = frozenset({"_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"})
_CACHE: dict[Any, OpInfo] = {}

# Operators with an answer of their own, see `specials`.
Special = Callable[[Any, Any, Any], tuple[bool, Any]]
SPECIAL: dict[Any, Special] = {}


def op_info(func: Any) -> OpInfo:
    """Facts of one operator overload."""
    info = _CACHE.get(func)
    if info is None:
        info = _CACHE[func] = _read(func)
    return info


def _read(func: Any) -> OpInfo:
    schema = func._schema
    writes = tuple(
        i
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    name = func._opname
    base = name.rstrip("_")
    foreach = base.startswith("_foreach_") and base.removeprefix("_foreach_") in _ELEMENTWISE
    elementwise = foreach or base in _FUSED or (base in _ELEMENTWISE and func.namespace == "aten")
    return OpInfo(
        writes=writes,
        returns_written=bool(writes) and bool(schema.returns),
        returns_nothing=not schema.returns,
        returns_view=views,
        elementwise=elementwise and "out" not in func._overloadname,
        writes_grads_away=base in ("zero", "_foreach_zero") and bool(writes),
        is_verdict=name in ("any", "all"),
        is_like=name.endswith("_like"),
    )


def same_layout(args: Any) -> bool:
    """True when all sharded operands lie alike, so that equal positions of the shards are equal
    positions of the whole.

    Lists are compared entry by entry (foreach): entry i of every list must lie like entry i of the
    first, or be plain in all of them. Plain operands must be scalars (0-dim). Numbers that are the
    same on all ranks (a norm) may come from another mesh.
    """
    first = args[0]
    if isinstance(first, (list, tuple)):
        lists = [
            a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)
        ]
        if (
            _share_specs(lists)
            and len(lists[0])
            and not any(isinstance(a, torch.Tensor) for a in args[1:])
        ):
            return True
        singles = [a for a in args[1:] if isinstance(a, torch.Tensor)]
        return all(s.ndim == 0 and _is_number(s) for s in singles) and all(
            _alike(entry) for entry in zip(*lists, strict=False)
        )
    return _alike(tuple(a for a in args if isinstance(a, torch.Tensor)))


def _share_specs(lists: list[Any]) -> bool:
    """The usual case of an optimizer, seen without a look at each tensor from Python: all lists
    hold DTensors, entry by entry with the very same spec, or plain numbers (steps). False says
    nothing.
    """
    specs: list[Any] | None = None
    for tensors in lists:
        kinds = set(map(type, tensors))
        if len(kinds) != 1:
            return False
        if not issubclass(kinds.pop(), DTensor):
            if any(map(_ndim, tensors)):
                return False
        elif specs is None:
            specs = list(map(_spec, tensors))
        elif len(tensors) != len(specs) or not all(map(is_, map(_spec, tensors), specs)):
            return False
    distinct = {id(placements): placements for placements in map(_placements, specs or ())}
    return not any(p.is_partial() for placements in distinct.values() for p in placements)


def all_none(values: Iterable[Any]) -> bool:
    return all(map(is_, values, repeat(None)))


def _alike(tensors: tuple[torch.Tensor, ...]) -> bool:
    sharded = [t for t in tensors if isinstance(t, DTensor)]
    if not sharded:
        return True
    first = sharded[0]
    spec, shape = first._spec, first.shape
    if any(p.is_partial() for p in spec.placements):
        return False
    for t in sharded[1:]:
        if _is_number(t):
            continue
        other = t._spec
        if other is spec:
            continue
        if t.shape != shape or other.placements != spec.placements or other.mesh != spec.mesh:
            return False
    return all(t.ndim == 0 for t in tensors if not isinstance(t, DTensor))


def _is_number(t: torch.Tensor) -> bool:
    """0-dim, and the same on all ranks."""
    if t.ndim or not isinstance(t, DTensor):
        return not t.ndim
    return all(p.is_replicate() for p in t._spec.placements)


def first_sharded(args: Any, cls: type) -> Any:
    """The first argument of that class."""
    return next(a for a in args if isinstance(a, cls))


def map_tensors(tree: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`fn` on the tensors of operator arguments: tuples, lists and dicts of them, not deeper than
    operators nest.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_tensors(item, fn) for item in tree]) if tree else tree
    if isinstance(tree, dict):
        return {key: map_tensors(item, fn) for key, item in tree.items()} if tree else tree
    return tree


# -- partial results -----------------------------------------------------------------------------
_TAKES_PARTIAL = frozenset({"stack", "detach", "alias", "view", "_to_copy", "clone"})


def takes_partial(func: Any, args: Any, placement: Any) -> bool:
    """True when an operator may take a partial result that is not a sum. DTensor sends more of them
    through, and a sum of parts of norms or maxima is not the norm or maximum of the whole.
    """
    order = getattr(placement, "norm_type", None)  # of a norm; DTensor counts it as a sum
    if order is None and (placement.is_partial("sum") or placement.is_partial("avg")):
        return True
    if func._opname == "linalg_vector_norm":  # a norm of norms of the same order
        return order == (args[1] if len(args) > 1 else 2)
    return func._opname in _TAKES_PARTIAL


def is_gathered_copy(view: Any, source: Any) -> bool:
    """True when the result of a view operator lies on every rank where its source was cut."""
    return view.placements is not source.placements and any(
        v.is_replicate() and not s.is_replicate() and not s.is_partial()
        for v, s in zip(view.placements, source.placements, strict=True)
    )


def averages_unevenly(out: Any, operands: list[Any]) -> bool:
    """True for a mean of the means of parts that are not equally large."""
    if not isinstance(out, DTensor):
        return False
    averaged = [i for i, p in enumerate(out.placements) if p.is_partial("avg")]
    return any(
        t.device_mesh == out.device_mesh
        and (dim := getattr(t.placements[i], "dim", None)) is not None
        and t.shape[dim] % t.device_mesh.size(i)
        for t in operands
        for i in averaged
    )


# -- empty shards --------------------------------------------------------------------------------
# Reductions that fail, or have no neutral answer, on a shard without elements: one neutral element
# stands in for it.
EMPTY_FILL: dict[Any, float] = {
    aten.linalg_vector_norm.default: 0.0,
    aten.norm.Scalar: 0.0,
    aten.norm.ScalarOpt_dim: 0.0,
    aten._foreach_norm.Scalar: 0.0,
    aten.max.default: float("-inf"),
    aten.min.default: float("inf"),
    aten.amax.default: float("-inf"),
    aten.amin.default: float("inf"),
}


def neutral(local: torch.Tensor, fill: float) -> torch.Tensor:
    """A stand-in for an empty shard, with one neutral row where it has none."""
    value = fill
    if fill and not local.dtype.is_floating_point:
        limits = torch.iinfo(local.dtype)
        value = limits.min if fill < 0 else limits.max
    return local.new_full([max(size, 1) for size in local.shape], value)


# Operators that have no answer for a shard without rows: they get the whole instead.
NEED_ROWS = frozenset({aten.argmax.default, aten.argmin.default})


def has_empty_part(t: Any) -> bool:
    """True when some rank has no row of `t`; all ranks give the same answer."""
    return any(
        dim is not None and t.shape[dim] <= -(-t.shape[dim] // size) * (size - 1)
        for p, size in zip(t.placements, t.device_mesh.shape, strict=True)
        if (dim := getattr(p, "dim", None)) is not None
    )


# -- randomness ----------------------------------------------------------------------------------
RANDOM_FILLS = (
    aten.normal_.default,
    aten.uniform_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.bernoulli_.float,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
)
RANDOM_LIKES = (
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
)
