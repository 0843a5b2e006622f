"""One forward and backward of a model without memory: what it calls in which order, and the bytes
of activations that are live at each point.

The model's own code runs on fake tensors (sizes and dtypes, no memory), its parameters in the dtype
that they are gathered in, its inputs cast and its units recomputed as the engine does it, with its
loss. So it holds for any model and attention and needs no formula. Gradients of parameters leave
as soon as they are there, as they leave for the engine's reductions; small ones wait for the end of
their unit.

A model that looks at values has none here: `None`, and whoever asks may guess.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shardwise._torch_compat import DispatchMode, FakeTensorMode
from shardwise.engine.core.arrivals import SMALL_BYTES
from shardwise.engine.services.activations import OFFLOADED_FROM_BYTES, Activations
from shardwise.engine.tensor.trees import cast_floats, tensors_in
from shardwise.plan.live import Held, Live
from shardwise.plan.model import PlannedUnit
from shardwise.plan.operators import Operators, Watched

CALLED, LEFT, FORWARD_OVER = "called", "left", "forward over"
REACHED, FIRST, COMPLETE, THROUGH = "reached", "first", "complete", "through"
BACKWARD_OVER = "backward over"


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that the engine acts on, and what was live before.

    called, left        a module of a unit is called; its forward is over
    reached             the gradient of a unit's output is there
    first, complete     the first large gradient of its parameters is there; all are
    through             the gradient of its only input is there: nothing in it is left to run
    """

    what: str
    unit: int  # its place in the plan, -1 for none
    most: Held  # the most since the mark before
    now: Held
    work: Operators = field(default_factory=Operators)  # since the mark before


@dataclass(frozen=True, slots=True)
class Trace:
    """Of one micro-batch."""

    marks: tuple[Mark, ...]
    host_bytes: int = 0  # the most of what units have moved to host memory

    @property
    def live_bytes(self) -> int:
        """The most of activations and logits together."""
        return max(mark.most.total for mark in self.marks)


def trace(
    model: nn.Module,
    units: Sequence[PlannedUnit],
    loss: Callable[[], Tensor],
    *,
    compute: torch.dtype,
    recompute: str = "none",
    to_host: bool = False,
    vocab_size: int | None = None,
) -> Trace | None:
    """What a forward and a backward of `loss` hold; None where the model cannot run without values.

    Args:
        model: unsharded, on any device; is as it was afterwards.
        units: of its plan.
        loss: calls the model once, on fake inputs that it makes.
        compute: what inputs of units are cast to.
        recompute, to_host: `activation_checkpointing` and `offload_activations` of `shard_model`.
        vocab_size: tells logits from other activations.
    """
    fakes, live = FakeTensorMode(allow_non_fake_inputs=True), Live(vocab_size)
    operators = Watched()
    kind = Activations.named(_KINDS[recompute], False)
    watched = _Watched(model, units, live, operators, compute, kind)
    was_training = model.training
    model.train()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings(action="ignore"))  # of addresses
            stack.enter_context(_without_borders())
            stack.enter_context(_as_fakes(model, units, fakes))
            stack.enter_context(watched.hooks(to_host=to_host))
            live.pass_over([*model.parameters(), *model.buffers()])
            stack.enter_context(fakes)
            stack.enter_context(_AllRows())
            stack.enter_context(live)
            stack.enter_context(operators)
            found = loss()
            watched.mark(FORWARD_OVER)
            found.backward()
            watched.end()
    except Exception:  # noqa: BLE001 - whatever a model does with values that are not there
        return None
    finally:
        model.train(was_training)
    return Trace(tuple(watched.marks), watched.host_peak)


_KINDS: dict[str, bool | str] = {"none": False, "full": True, "selective": "selective"}


class _Watched:
    """The hooks that the engine has too, and what they tell."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[PlannedUnit],
        live: Live,
        operators: Watched,
        compute: torch.dtype,
        activations: Activations,
    ) -> None:
        self.marks: list[Mark] = []
        self.host_peak = self._host = 0
        self._model, self._units, self._live = model, units, live
        self._operators = operators
        self._compute, self._activations = compute, activations
        self._vocab_size, self._depth = live.vocab_size, 0  # of units inside of the root
        self._left = [
            {p.name for b in u.layout.buckets for p in b.params if p.spec.requires_grad}
            for u in units
        ]
        self._sizes = [
            {p.name: p.numel * b.gather_dtype.itemsize for b in u.layout.buckets for p in b.params}
            for u in units
        ]
        self._small: list[list[Tensor]] = [[] for _ in units]
        self._has_first = [False] * len(units)
        self._behind: tuple[Tensor, list[Callable[[], None]]] | None = None
        self._in_backward = False

    def mark(self, what: str, unit: int = -1) -> None:
        live, work = self._live, self._operators.take()
        self.marks.append(Mark(what, unit, live.take_peak(), live.now, work))

    def end(self) -> None:
        self._collect(but=-1)
        self.mark(BACKWARD_OVER)

    # -- hooks -----------------------------------------------------------------------------------
    @contextlib.contextmanager
    def hooks(self, *, to_host: bool) -> Iterator[None]:
        handles, wrapped = [], []
        for number, unit in enumerate(self._units):
            for name in unit.modules:
                module = self._model.get_submodule(name)
                if not unit.is_root and not (self._activations.is_plain and not to_host):
                    wrapped.append((module, module.__dict__.get("forward")))
                    module.forward = partial(self._around, module.forward, to_host)
                before, behind = partial(self._before, number), partial(self._behind_call, number)
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(behind))
            for bucket in unit.layout.buckets:
                for param in bucket.params:
                    full = self._model.get_parameter(param.name)
                    if full.requires_grad:
                        told = partial(self._arrived, number, param.name)
                        handles.append(full.register_post_accumulate_grad_hook(told))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, forward in wrapped:
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _around(self, forward: Callable[..., Any], to_host: bool, *args: Any, **kwargs: Any) -> Any:
        moved = _Moved(self) if to_host else contextlib.nullcontext()
        with moved:
            if self._activations.is_plain:
                return forward(*args, **kwargs)
            return self._activations.run(None, forward, args, kwargs)  # type: ignore[arg-type]

    def _before(self, number: int, _module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.mark(CALLED, number)
        self._depth += not self._units[number].is_root
        self._live.vocab_size = None if self._depth else self._vocab_size
        args, kwargs = cast_floats(args, self._compute), cast_floats(kwargs, self._compute)
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        if len(inputs) == 1:
            through = partial(self._through, number)
            if self._behind is not None and self._behind[0] is inputs[0]:
                self._behind[1].insert(0, through)  # before the unit that made it is reached
            else:
                inputs[0].register_hook(lambda _grad: through())
        return args, kwargs

    def _behind_call(self, number: int, _module: Any, _args: Any, out: Any) -> None:
        self._behind = None
        for tensor in tensors_in(out):
            if tensor.requires_grad:
                calls = [partial(self._reached, number)]
                tensor.register_hook(partial(_call_all, calls))
                if isinstance(out, Tensor):
                    self._behind = (tensor, calls)
        self.mark(LEFT, number)
        self._depth -= not self._units[number].is_root
        self._live.vocab_size = None if self._depth else self._vocab_size

    # -- the backward ----------------------------------------------------------------------------
    def _reached(self, number: int) -> None:
        self._collect(but=number)
        self.mark(REACHED, number)
        self._live.vocab_size = self._vocab_size if self._units[number].is_root else None

    def _through(self, number: int) -> None:
        self._collect_one(number)
        self.mark(THROUGH, number)

    def _arrived(self, number: int, name: str, full: Tensor) -> None:
        grad, full.grad = full.grad, None
        assert grad is not None
        left = self._left[number]
        left.discard(name)
        if grad.nbytes <= SMALL_BYTES:
            self._small[number].append(grad)
            return
        if not self._has_first[number]:
            self._has_first[number] = True
            self.mark(FIRST, number)
        del grad
        if not left and not self._small[number]:
            self.mark(COMPLETE, number)

    def _collect(self, but: int) -> None:
        """Units whose last gradient was a small one: the engine looks for these now."""
        for number in range(len(self._units)):
            if number != but:
                self._collect_one(number)

    def _collect_one(self, number: int) -> None:
        if self._small[number] and not self._left[number]:
            self._small[number].clear()
            self.mark(COMPLETE, number)


def _call_all(calls: list[Callable[[], None]], _grad: Tensor) -> None:
    for call in calls:
        call()


class _Moved(torch.autograd.graph.saved_tensors_hooks):
    """What units save is on the host, as `engine.services.activations.OnHost` moves it."""

    def __init__(self, watched: _Watched) -> None:
        held = {p.untyped_storage()._cdata for p in watched._model.parameters()}

        def pack(tensor: Tensor) -> Any:
            size = tensor.numel() * tensor.itemsize
            if size < OFFLOADED_FROM_BYTES or tensor.untyped_storage()._cdata in held:
                return tensor
            watched._host += size
            watched.host_peak = max(watched.host_peak, watched._host)
            return tensor.shape, tensor.dtype, size

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            shape, dtype, size = packed
            watched._host -= size
            return torch.empty(shape, dtype=dtype)

        super().__init__(pack, unpack)


# -- a model without values ------------------------------------------------------------------------
@contextlib.contextmanager
def _as_fakes(
    model: nn.Module, units: Sequence[PlannedUnit], fakes: FakeTensorMode
) -> Iterator[None]:
    """Parameters and buffers have no memory; parameters the dtype that they are gathered in."""
    dtypes = {
        id(model.get_parameter(p.name)): b.gather_dtype
        for u in units
        for b in u.layout.buckets
        for p in b.params
    }
    held: list[dict[str, Any]] = []
    for module in model.modules():
        held += [module._parameters, module._buffers]
    before = [dict(tensors) for tensors in held]
    made: dict[int, Tensor] = {}
    try:
        for tensors in held:
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _fake(tensor, dtypes.get(id(tensor)), fakes)
                tensors[name] = made[id(tensor)]
        yield
    finally:
        for tensors, real in zip(held, before, strict=True):
            tensors.update(real)


def _fake(tensor: Tensor, dtype: torch.dtype | None, fakes: FakeTensorMode) -> Tensor:
    with fakes:
        if dtype is not None and tensor.dtype.is_complex:
            dtype = tensor.dtype
        made = torch.empty(tensor.shape, dtype=dtype or tensor.dtype)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


@contextlib.contextmanager
def _without_borders() -> Iterator[None]:
    """Where transformers looks for borders of packed documents in positions, there are none."""
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    with mock.patch.object(masks, "find_packed_sequence_indices", lambda *_: None):
        yield


class _AllRows(DispatchMode):
    """A mask chooses all rows: how many it would is a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _INDEXED:
            args = (args[0], [_rows(index) for index in args[1]], *args[2:])
        return func(*args, **(kwargs or {}))


_ATEN = torch.ops.aten
_INDEXED = (_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_)


def _rows(index: Tensor | None) -> Tensor | None:
    is_mask = index is not None and index.dtype == torch.bool and index.ndim == 1
    return torch.arange(index.numel()) if index is not None and is_mask else index
