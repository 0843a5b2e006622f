"""`ShardTensor`: the DTensor that a sharded parameter, its gradient and its optimizer state are
made of.

It is a DTensor in every respect (placements, mesh, checkpointing) and closed under operations:
what comes out of an operation on it is one again. On top of DTensor it

  * counts writes to the unit's shards, so that a gathered copy that was kept is known to be stale
  (`Mark`);
  * finishes partial results before a number leaves (`item`, `bool`, format), which DTensor gives
  out unreduced;
  * draws random fills (`normal_`, `uniform_`, ...) as one process would, so the numbers do not
  depend on the world size;
  * lets writes to a row, or another view that DTensor makes by a copy, reach the parameter;
  * takes full plain tensors in `copy_`, so a plain state dict loads into a sharded model;
  * serves norms and extrema of empty shards;
  * runs element-wise (foreach, fused) operations on the local shards at once, past DTensor's
  dispatcher;
  * settles a gradient that is still a sum on every rank (gradient accumulation without sync) when
  it is read.

Writes that bypass dispatch (`to_local().data`, numpy) are not seen; `mark_dirty(model)` exists for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwise._torch_compat import (
    in_parametrization,
    local_of,
    make_spec,
    new_dtensor,
    new_dtensors,
    repoint,
    says_mixed,
    says_uneven,
    spec_of,
    strided_shard,
)
from shardwise.engine.mesh.rows import part_of
from shardwise.engine.tensor import operators as rules
from shardwise.engine.tensor import own_cuts, texts
from shardwise.engine.tensor.own_cuts import cuts_its_own_way
from shardwise.errors import EngineError


class Mark:
    """Shared by the parameters of a unit: how often their shards were written, and whether `.data`
    of one was set to memory outside of the unit's buffer. `complete`: another thread writes to them
    (`offload.behind`), and this waits for it. Whoever is about to read shards calls it.
    """

    __slots__ = ("complete", "count", "moved", "name", "steps_in_backward", "sum_order")

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.moved = False
        self.complete: Callable[[], None] | None = None
        self.steps_in_backward = False
        self.sum_order: Any = None  # set while a reproducible run is on

    def begin_writing(self, complete: Callable[[], None]) -> None:
        """Another thread writes to the shards from here on, until `end_writing`."""
        self.complete = complete
        _BEING_WRITTEN[0] += 1

    def end_writing(self) -> None:
        self.complete = None
        _BEING_WRITTEN[0] -= 1


# How many marks another thread writes to: while there are none, nobody looks for them.
_BEING_WRITTEN = [0]


def complete_writing(args: Any) -> None:
    """Wait for another thread that writes to what these show, which may be views of shards."""
    for mark in set(filter(None, map(_mark, _sharded_in(args)))):
        if mark.complete is not None:
            mark.complete()


class Pending(Protocol):
    """What a gradient still lacks: `settle` reduces it over the ranks (a collective), `drop`
    forgets it.
    """

    def settle(self) -> None: ...

    def drop(self) -> None: ...


class ShardTensor(DTensor):
    """A DTensor with a write mark and, for gradients, a part that is not reduced yet. See the
    module docstring.
    """

    _mark: Mark | None
    _param_name: str
    _pending: Pending | None
    _write_back: Callable[[], None] | None = None  # of a view that is a copy, see `_writer`
    __slots__ = ["_mark", "_param_name", "_pending"]

    def __new__(
        cls,
        local: torch.Tensor,
        spec: Any,
        *,
        requires_grad: bool = False,
        mark: Mark | None = None,
        name: str = "",
    ) -> ShardTensor:
        self = new_dtensor(cls, local, spec, requires_grad)
        self._mark = mark
        self._param_name = name
        self._pending = None
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """`__new__` has done it; DTensor's own `__init__` would take a dispatch."""

    @classmethod
    def gradients(cls, parts: Sequence[torch.Tensor], specs: Sequence[Any]) -> list[ShardTensor]:
        """What `ShardTensor(part, spec)` makes of each, in less than half the time: there is one
        for each parameter and step.
        """
        made = new_dtensors(cls, parts, specs)
        for grad in made:
            grad._mark = grad._pending = None
            grad._param_name = ""
        return made

    @classmethod
    def bare(cls, local: torch.Tensor, spec: Any) -> ShardTensor:
        """What `ShardTensor(local, spec)` makes, in half the time: optimizers make many."""
        self = new_dtensor(cls, local, spec)
        self._mark = self._pending = None
        self._param_name = ""
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _BEING_WRITTEN[0]:
            complete_writing((*args, *kwargs.values()))
        special = rules.SPECIAL.get(func)
        if special is not None:
            done, result = special(func, args, kwargs)
            if done:
                return result
        info = rules.op_info(func)
        if info.writes_grads_away and _drop_pending(args):
            pass
        else:
            settle(args)
        if info.writes:
            _finish_partial(info, args)
        if info.elementwise and rules.same_layout(args):
            result = _run_local(func, info, args, kwargs)
        elif any(map(cuts_its_own_way, _sharded_in((*args, *kwargs.values())))):
            result = _run_own_cuts(func, info, args, kwargs)
        else:
            result = _run_dtensor(func, info, args, kwargs)
        if info.is_verdict and type(result) is ShardTensor:
            result = finished(result)
        if info.writes:
            _mark_written(info, args)
        return result

    # -- data ------------------------------------------------------------------------------------
    @property  # type: ignore[override]
    def data(self) -> Any:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Rebind, as for plain tensors. DTensor would keep its local tensor, without a word; the
        engine moves a parameter's new memory into its unit's buffer before the next forward.
        """
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ValueError(
                f"{self._param_name or 'ShardTensor'}: .data set to a tensor of shape "
                f"{tuple(value.shape)} and {value.dtype}, expected {tuple(self.shape)} and "
                f"{self.dtype}; use model.to(dtype), or replace the parameter before sharding"
            )
        if not isinstance(value, DTensor):
            value = ShardTensor(own_part(value.detach(), self).contiguous(), spec_of(self))
        elif value.placements != self.placements or value.device_mesh != self.device_mesh:
            # type: ignore[attr-defined]
            value = value.detach().redistribute(self.device_mesh, self.placements)
        settle((self, value))
        self._local_tensor = local_of(value).detach()
        if self._mark is not None:
            self._mark.count += 1
            self._mark.moved = True

    @property  # type: ignore[override]
    def grad_dtype(self) -> torch.dtype | None:
        return torch.Tensor.grad_dtype.__get__(self)  # type: ignore[attr-defined]

    @grad_dtype.setter
    def grad_dtype(self, dtype: torch.dtype | None) -> None:
        """A parameter whose gradient gets another dtype is laid out anew before the next pass."""
        torch.Tensor.grad_dtype.__set__(self, dtype)  # type: ignore[attr-defined]
        if self._mark is not None:
            self._mark.moved = True

    # -- torch.distributed.checkpoint: a part of its own ------------------------------------------
    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        if cuts_its_own_way(self):
            return [own_cuts.write_item_of(fqn, self)]
        return super().__create_write_items__(fqn, object)

    def __create_chunk_list__(self) -> list[Any]:
        if cuts_its_own_way(self):
            return [own_cuts.chunk_of(self)]
        return super().__create_chunk_list__()

    # -- reading ---------------------------------------------------------------------------------
    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        settle((self,))
        return super().to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        settle((self,))
        if cuts_its_own_way(self):
            return local_of(own_cuts.joined(self))
        return super().full_tensor(grad_placements=grad_placements)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        settle((self,))
        if cuts_its_own_way(self):
            return own_cuts.joined(self).redistribute(*args, **kwargs)
        return super().redistribute(*args, **kwargs)

    def tolist(self) -> Any:
        return self.full_tensor().tolist()

    def __format__(self, format_spec: str) -> str:
        return (
            format(self.item(), format_spec) if self.dim() == 0 else super().__format__(format_spec)
        )

    def numpy(self, *, force: bool = False) -> Any:
        raise EngineError(
            f"{self._param_name or 'ShardTensor'}: numpy() of a sharded tensor would give this "
            f"rank's part only; "
            "use .full_tensor().numpy() (a collective), or .to_local().numpy() for the part"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if self.dim() == 0 and all(p.is_replicate() for p in self.placements):
            return repr(local_of(self))  # a norm, a loss: all ranks have all of it
        name = f"{self._param_name!r}, " if self._param_name else ""
        return (
            f"ShardTensor({name}shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"placements={self.placements}, "
            f"local={tuple(local_of(self).shape)} on {local_of(self).device})"
        )

    # -- copies ----------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        """A copy of the shard alone: the storage that it is a view of belongs to the whole
        bucket.
        """
        if id(self) in memo:
            return memo[id(self)]
        settle((self,))
        local = local_of(self).detach().clone()
        copy = ShardTensor(local, spec_of(self), name=self._param_name)
        memo[id(self)] = copy = _like_parameter(copy, self)
        copy.__dict__.update(deepcopy(_attributes(self), memo))
        if self.grad is not None:
            copy.grad = deepcopy(self.grad, memo)
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        settle((self,))
        local = local_of(self).detach().clone()
        is_param = getattr(self, "_is_param", False)
        made_of = (local, spec_of(self), self.requires_grad, is_param, self._param_name)
        attributes = _attributes(self)
        return _rebuild, (*made_of, attributes) if attributes else made_of


# What torch's asynchronous checkpointing copies, slot by slot; the others are the engine's own.
ShardTensor.__slots__ = ["_local_tensor", "_spec", "_param_name"]


def _rebuild(
    local: torch.Tensor,
    spec: Any,
    requires_grad: bool,
    is_param: bool,
    name: str,
    attributes: dict[str, Any] | None = None,
) -> ShardTensor:
    tensor: Any = ShardTensor(local, spec, name=name)
    if is_param:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    tensor.__dict__.update(attributes or {})
    return tensor.requires_grad_(requires_grad)


def _attributes(tensor: ShardTensor) -> dict[str, Any]:
    """Those that users have set."""
    own = ("_is_param", "_shardwise_home", "_write_back")
    return {key: value for key, value in vars(tensor).items() if key not in own}


# `torch.load` by its defaults makes only what is named: tensors, specs and meshes are by torch.
torch.serialization.add_safe_globals([_rebuild, type(strided_shard(0, 2))])


def _like_parameter(copy: ShardTensor, source: ShardTensor) -> ShardTensor:
    if getattr(source, "_is_param", False):
        copy = torch.nn.Parameter(copy, source.requires_grad)  # type: ignore[assignment]
    else:
        copy.requires_grad_(source.requires_grad)
    if source.grad_dtype != source.dtype:
        copy.grad_dtype = source.grad_dtype
    return copy


_local, _mark = attrgetter("_local_tensor"), attrgetter("_mark")
_pending, _write_back = attrgetter("_pending"), attrgetter("_write_back")
_ONLY_SHARDED = {ShardTensor}


# -- dispatch ------------------------------------------------------------------------------------
def _run_local(func: Any, info: rules.OpInfo, args: Any, kwargs: Any) -> Any:
    """Element-wise on equal layouts: the operation on the shards is the operation on the whole."""
    out = func(*map(_locals_in, args), **rules.map_tensors(kwargs, local_or_self))
    if info.returns_nothing:
        return None
    if info.returns_written:
        return args[0]
    if isinstance(out, (list, tuple)):
        return type(out)([wrap_like(o, like) for o, like in zip(out, args[0], strict=True)])
    return wrap_like(out, rules.first_sharded(args, ShardTensor))


def _locals_in(arg: Any) -> Any:
    """An operator's argument with local tensors in place of sharded ones."""
    if isinstance(arg, (list, tuple)) and set(map(type, arg)) == _ONLY_SHARDED:
        return list(map(_local, arg))
    return rules.map_tensors(arg, local_or_self)


def local_or_self(t: torch.Tensor) -> torch.Tensor:
    return local_of(t) if isinstance(t, DTensor) else t


def wrap_like(local: torch.Tensor, like: Any) -> torch.Tensor:
    """`like`'s layout with the dtype of `local`."""
    if not isinstance(like, DTensor):
        return local
    spec = spec_of(like)
    if local.dtype != like.dtype:
        spec = make_spec(spec.mesh, spec.placements, like.shape, like.stride(), local.dtype)
    return ShardTensor.bare(local, spec)


def _run_dtensor(func: Any, info: rules.OpInfo, args: Any, kwargs: Any) -> Any:
    args = _with_rows(args) if func in rules.NEED_ROWS else args
    originals: dict[int, ShardTensor] = {}
    fill = rules.EMPTY_FILL.get(func)

    def unwrap(t: torch.Tensor) -> torch.Tensor:
        if type(t) is not ShardTensor:
            return t
        if any(p.is_partial() and not rules.takes_partial(func, args, p) for p in t.placements):
            t = finished(t)
        local = local_of(t)
        if fill is not None and local.numel() == 0 and t.numel() > 0:
            local = rules.neutral(local, fill)
        plain = new_dtensor(DTensor, local, spec_of(t))
        originals[id(plain)] = t
        return plain

    plain_args, plain_kwargs = rules.map_tensors(args, unwrap), rules.map_tensors(kwargs, unwrap)
    try:
        out = func(*plain_args, **plain_kwargs)
    except RuntimeError as error:
        if not _may_run_whole(info, error):
            _explain(error, func, originals, args)
            raise
        out = _run_whole(func, info, args, kwargs)
    like = spec_of(args[0]) if info.is_like and type(args[0]) is ShardTensor else None
    if rules.averages_unevenly(out, list(originals.values())):
        out = func(*rules.map_tensors(args, whole_of), **rules.map_tensors(kwargs, whole_of))
    source = args[0] if info.returns_view and args and type(args[0]) is ShardTensor else None

    def wrap(t: torch.Tensor) -> torch.Tensor:
        if not isinstance(t, DTensor):
            return t
        if id(t) in originals:
            return originals[id(t)]
        if like is not None and spec_of(t) == like:
            return ShardTensor(local_of(t), like)  # optimizer state shares its parameter's spec
        if source is None:
            return ShardTensor(local_of(t), spec_of(t))
        return _view_of(source, t, out, lambda w: func(w, *args[1:]))

    return rules.map_tensors(out, wrap)


def _run_own_cuts(func: Any, info: rules.OpInfo, args: Any, kwargs: Any) -> Any:
    if own_cuts.works_on_shards(func, info) and type(args[0]) is ShardTensor:
        out = _run_local(func, info, args, kwargs)
        return _view_of(args[0], out, out, lambda w: w) if info.returns_view else out
    out = _run_whole(func, info, args, kwargs)
    if not info.returns_view or type(args[0]) is not ShardTensor:
        return out

    def view(t: Any) -> ShardTensor:
        return _view_of(args[0], t, out, lambda w: func(w, *args[1:]))

    return rules.map_tensors(out, view)


def _may_run_whole(info: rules.OpInfo, error: RuntimeError) -> bool:
    """DTensor has no rule for the operator, or a parametrization that is computed at rest has met
    tensors of its own, which are whole; and nothing has to reach the shards.
    """
    if info.writes or info.returns_view:
        return False
    is_whole = says_mixed(error) and in_parametrization()
    return is_whole or isinstance(error, NotImplementedError)


def _explain(error: RuntimeError, func: Any, originals: dict[int, ShardTensor], args: Any) -> None:
    """Raise an error of ours where there is one, else say at `error` what to do."""
    if says_mixed(error):
        raise EngineError(texts.mixed_text(func, originals, args)) from error
    if says_uneven(error):
        raise EngineError(texts.uneven_text(func, originals)) from error
    error.add_note(texts.no_rule_note(func, originals))


def _run_whole(func: Any, info: rules.OpInfo, args: Any, kwargs: Any) -> Any:
    """For an operator that DTensor has no rule for: every rank computes with whole operands, and
    what is written goes back into the shards.
    """
    mesh = next(t.device_mesh for t in _sharded_in((*args, *kwargs.values())))
    replicated = (Replicate(),) * mesh.ndim
    written: list[tuple[ShardTensor, torch.Tensor]] = []

    def wrap(t: torch.Tensor) -> torch.Tensor:
        return ShardTensor(t, make_spec(mesh, replicated, t.shape, t.stride(), t.dtype))

    def whole(t: torch.Tensor) -> torch.Tensor:
        return local_of(whole_of(finished(t))) if type(t) is ShardTensor else local_or_self(t)

    def writable(t: torch.Tensor) -> torch.Tensor:
        full = whole(t)
        if type(t) is ShardTensor:
            full = full.clone()
            written.append((t, full))
        return full

    names = {func._schema.arguments[i].name for i in info.writes}
    given = [
        rules.map_tensors(a, writable if i in info.writes else whole) for i, a in enumerate(args)
    ]
    named = {k: rules.map_tensors(a, writable if k in names else whole) for k, a in kwargs.items()}
    out = func(*given, **named)
    for target, full in written:
        store(target, full)
    if info.returns_nothing:
        return None
    if info.returns_written:
        return written[0][0] if written else args[0]
    return rules.map_tensors(out, wrap)


def _view_of(source: ShardTensor, t: DTensor, out: Any, cut: Callable[[Any], Any]) -> ShardTensor:
    """A result `t` of a view operator; `cut` does the same to a plain tensor and gives `out`."""
    view = ShardTensor(local_of(t), spec_of(t), mark=source._mark, name=source._param_name)
    if source._write_back is not None:
        view._write_back = source._write_back
    if rules.is_gathered_copy(view, source):
        many = isinstance(out, (list, tuple))
        index = next(i for i, o in enumerate(out) if o is t) if many else None
        view._write_back = _writer(
            source, view, lambda w: cut(w) if index is None else cut(w)[index]
        )
    return view


def _writer(
    source: ShardTensor, view: ShardTensor, cut: Callable[[Any], Any]
) -> Callable[[], None]:
    """For a view along a sharded dim: DTensor gathers it, so it is a copy. What is written to it
    goes back into `source` by this, a collective.
    """
    local, spec = local_of(view), spec_of(view)

    def write_back() -> None:
        whole = local_of(whole_of(source)).clone()
        cut(whole).copy_(local_of(whole_of(new_dtensor(DTensor, local, spec))))
        store(source, whole)

    return write_back


def _with_rows(args: Any) -> Any:
    lacking = any(rules.has_empty_part(t) for t in _sharded_in(args))
    return rules.map_tensors(args, whole_of) if lacking else args


def whole_of(t: torch.Tensor) -> torch.Tensor:
    """All of it on every rank, as a plain DTensor."""
    if not isinstance(t, DTensor):
        return t
    if cuts_its_own_way(t):
        return own_cuts.joined(t)
    plain = new_dtensor(DTensor, local_of(t), spec_of(t))
    return plain.redistribute(placements=[Replicate()] * t.device_mesh.ndim)


def _finish_partial(info: rules.OpInfo, args: Any) -> None:
    """A partial result that is written in place is finished before: a square is not that of
    parts.
    """
    for position in info.writes:
        target = args[position] if position < len(args) else None
        if type(target) is ShardTensor and any(p.is_partial() for p in target.placements):
            whole = target.redistribute(placements=[Replicate()] * target.device_mesh.ndim)
            repoint(target, local_of(whole), spec_of(whole))


def finished(t: ShardTensor) -> ShardTensor:
    """`t` without partial placements (a collective where it has some)."""
    if not any(p.is_partial() for p in t.placements):
        return t
    whole = t.redistribute(placements=[Replicate() if p.is_partial() else p for p in t.placements])
    return ShardTensor(local_of(whole), spec_of(whole))


def _mark_written(info: rules.OpInfo, args: Any) -> None:
    for position in info.writes:
        target = args[position] if position < len(args) else None
        if isinstance(target, (list, tuple)) and set(map(type, target)) == _ONLY_SHARDED:
            for mark in set(map(_mark, target)):
                if mark is not None:
                    mark.count += 1
            for write_back in filter(None, map(_write_back, target)):
                write_back()
            continue
        for t in target if isinstance(target, (list, tuple)) else (target,):
            if type(t) is ShardTensor:
                written(t)


def written(t: ShardTensor) -> None:
    if t._mark is not None:
        t._mark.count += 1
    if t._write_back is not None:
        t._write_back()


def _sharded_in(args: Any) -> Iterator[ShardTensor]:
    for arg in args:
        if type(arg) is ShardTensor:
            yield arg
        elif isinstance(arg, (list, tuple)):
            for item in arg:
                if type(item) is ShardTensor:
                    yield item


def settle(args: Any) -> None:
    if _BEING_WRITTEN[0]:
        complete_writing(args)
    for arg in args:
        if type(arg) is ShardTensor:
            if arg._pending is not None:
                arg._pending.settle()
        elif isinstance(arg, (list, tuple)) and arg:
            sharded = [t for t in arg if type(t) is ShardTensor]
            if not rules.all_none(map(_pending, sharded)):
                for t in sharded:
                    if t._pending is not None:
                        t._pending.settle()


def _drop_pending(args: Any) -> bool:
    """For `zero_`: what was still to be reduced is forgotten with the rest. True when anything
    was.
    """
    dropped = False
    for t in _sharded_in(args):
        if t._pending is not None:
            t._pending.drop()
            dropped = True
    return dropped


def store(target: ShardTensor, whole: torch.Tensor) -> None:
    if target._pending is not None:
        target._pending.drop()
    local_of(target).copy_(own_part(whole, target))
    written(target)


def own_part(whole: torch.Tensor, like: ShardTensor) -> torch.Tensor:
    """This rank's part of `whole`, a view; `distribute_tensor` copies, and meta init would hold a
    large parameter twice.
    """
    return part_of(whole, like.device_mesh, like.placements)
