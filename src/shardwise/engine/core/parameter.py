"""One parameter of a unit: the registered shard, the gathered form, the modules that hold it, its
gradient.

sharded   nn.Parameter over ShardTensor, registered at rest; its local tensor is a view into the
          bucket's buffer
full      nn.Parameter over the bucket's gathered buffer, registered while the unit runs
partial   sum of gradients that were not reduced yet (accumulation without sync), full shape,
          reduce dtype
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import (
    hooks_of,
    local_of,
    share_hooks,
    spec_of,
)
from shardwise.engine.mesh.axes import ShardMesh
from shardwise.engine.mesh.spread import Spread
from shardwise.engine.tensor.shard_tensor import Mark, Pending, ShardTensor
from shardwise.layout import ParamLayout

Slot = tuple[dict[str, Any], str]  # a module's `_parameters` and the name in it

_HOME = "_shardwise_home"
_NOT_USERS = frozenset({_HOME, "_is_param"})
_SIMPLE = frozenset({torch.Tensor, nn.Parameter, DTensor, ShardTensor})  # nothing of theirs in vars


def home_of(tensor: torch.Tensor) -> ShardedParam | None:
    """The sharded parameter that took the place of `tensor`, or whose full form it is."""
    ref = getattr(tensor, _HOME, None)
    return ref() if ref is not None else None


class Belongings:
    """What users hang on a parameter: attributes, hooks, a class of their own. It belongs to the
    parameter, whatever form that has: forms share it, so handles of hooks that were set before
    sharding remove them, and what is set on one form is there on the others.
    """

    __slots__ = ("attributes", "hooks", "kind")

    def __init__(self, origin: torch.Tensor) -> None:
        inner = () if type(origin) in _SIMPLE else vars(origin.detach())
        self.attributes: dict[str, Any] = {
            k: v for k, v in vars(origin).items() if k not in _NOT_USERS and k not in inner
        }
        self.hooks = hooks_of(origin)
        kind = type(origin)
        is_own = issubclass(kind, nn.Parameter) and not hasattr(kind, "materialize")
        self.kind: Any = kind if is_own and kind is not nn.Parameter else None

    def give(self, form: torch.Tensor) -> None:
        """Share the attributes with a form of the parameter."""
        if vars(form) is self.attributes:
            return
        if type(form) in _SIMPLE:
            self.attributes.update(vars(form))
            form.__dict__ = self.attributes
        else:  # a subclass that may keep tensors of its own there
            for key, value in self.attributes.items():
                vars(form).setdefault(key, value)

    def give_registered(self, sharded: Any) -> None:
        """The same, with the hooks: the engine runs those of the registered form."""
        self.give(sharded)
        share_hooks(sharded, self.hooks)

    def give_full(self, full: torch.Tensor) -> None:
        self.give(full)
        if self.kind is not None and type(full) is nn.Parameter:
            full.__class__ = self.kind


class ShardedParam:
    """See the module docstring. `slots` has more than one entry for tied parameters."""

    __slots__ = (
        "__weakref__",
        "_place",
        "belongings",
        "between",
        "full",
        "layout",
        "mark",
        "mesh",
        "name",
        "partial",
        "partial_grad",
        "rows",
        "sharded",
        "slots",
        "spread",
        "unit",
    )

    def __init__(
        self,
        name: str,
        layout: ParamLayout,
        slots: list[Slot],
        mesh: ShardMesh,
        spread: Spread,
        mark: Mark,
    ) -> None:
        self.name = name
        self.layout = layout
        self.slots = slots
        self.mesh = mesh
        self.rows = mesh.own_rows(layout.cuts)  # first and number of those of the registered part
        self.spread = spread
        self.mark = mark
        self.sharded: nn.Parameter = None  # type: ignore[assignment]  # set by make_sharded
        self.full: nn.Parameter = None  # type: ignore[assignment]  # set by the bucket
        self.belongings: Belongings | None = None  # set by the first `make_sharded`
        self.unit: Callable[[], Any] = lambda: None  # a weak reference, set by the unit
        self.between: nn.Parameter | None = None  # over a smaller world, see `stages`
        self._place = 0  # where its part lies, since it was laid out
        self.partial: torch.Tensor | None = None
        self.partial_grad: ShardTensor | None = None

    # -- the registered shard --------------------------------------------------------------------
    def make_sharded(self, local: torch.Tensor, origin: torch.Tensor) -> None:
        """A new registered parameter over `local`, with the attributes and hooks of the one it
        replaces.
        """
        self.sharded = make_parameter(
            local, self.spread, self.name, self.mark, origin.requires_grad
        )
        if origin.grad_dtype != origin.dtype:
            self.sharded.grad_dtype = origin.grad_dtype
        self.settle_home(origin)
        self._settle_place(origin)

    def settle_home(self, tensor: torch.Tensor) -> None:
        """Leave word on a tensor that this is what it became: tied modules and optimizers ask."""
        setattr(tensor, _HOME, weakref.ref(self))

    def adopt_sharded(self, local: torch.Tensor, sharded: nn.Parameter) -> None:
        """Point a parameter that optimizers hold at its new place in the buffer."""
        tensor: Any = sharded
        if tensor._local_tensor is not local:  # the very object, where it has hooks of its own
            tensor._local_tensor = local.detach()
        if tensor.placements != self.spread.placements:  # `swap_tensors` with something computed
            tensor._spec = self.spread.sharded_spec(local.dtype)
        tensor._mark, tensor._param_name = self.mark, self.name
        self.sharded = sharded
        self._settle_place(sharded)

    def _settle_place(self, origin: torch.Tensor) -> None:
        if self.belongings is None:
            self.belongings = Belongings(origin)
        self.belongings.give_registered(self.sharded)
        self.settle_home(self.sharded)
        self._place = _place_of(self.local)

    @property
    def is_in_place(self) -> bool:
        """True while the registered parameter is as it was laid out: its memory, its mark, the
        dtype of its gradient.
        """
        sharded: Any = self.sharded
        return (
            sharded._mark is self.mark
            and home_of(sharded) is self  # `swap_tensors` takes attributes and hooks with it
            and sharded.grad_dtype in (None, self.grad_spec.tensor_meta.dtype)
            and _place_of(self.local) == self._place
        )

    def set_full(self, tensor: torch.Tensor) -> None:
        """The gathered form, a new one."""
        self.full = nn.Parameter(tensor, requires_grad=self.sharded.requires_grad)
        assert self.belongings is not None
        self.belongings.give_full(self.full)
        self.settle_home(self.full)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of the registered part."""
        spec = self.layout.spec
        if not spec.shape:
            return ()
        d, shape = spec.shard_dim, spec.shape[: len(spec.shape) - spec.is_complex]
        return (*shape[:d], self.rows[1], *shape[d + 1 :]) if shape else ()

    @property
    def grad_spec(self) -> Any:
        """The DTensor spec of its gradient."""
        dtype = self.layout.spec.grad_dtype
        if dtype is None:
            return spec_of(self.sharded)
        return self.spread.sharded_spec(
            dtype.to_complex() if self.layout.spec.is_complex else dtype
        )

    @property
    def local(self) -> torch.Tensor:
        """This rank's part."""
        return local_of(self.sharded)

    @property
    def full_own(self) -> torch.Tensor:
        """This rank's own part of the full form: the whole, unless that is a DTensor."""
        full = self.full.detach()
        return local_of(full) if isinstance(full, DTensor) else full

    def is_form(self, tensor: torch.Tensor | None) -> bool:
        """Whether `tensor` is one of the forms in which modules hold this parameter."""
        return tensor is not None and (
            tensor is self.sharded or tensor is self.full or tensor is self.between
        )

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        """What its slots show now, in place of one of its forms, or of what it was made of."""
        for parameters, name in self.slots[:1]:
            held: Any = parameters.get(name)
            if self.is_form(held):
                return held
        return tensor

    def local_zeros(self) -> torch.Tensor:
        """Plain zeros like this rank's part of the gradient."""
        local, dtype = self.local, self.grad_spec.tensor_meta.dtype
        return torch.zeros(local.shape, dtype=dtype, device=local.device)

    def rename(self, name: str) -> None:
        """The full name, once the root is known; for error texts."""
        self.name = name
        self.sharded._param_name = name  # type: ignore[attr-defined]

    # -- gradients -------------------------------------------------------------------------------
    def add_partial(self, grad: torch.Tensor, dtype: torch.dtype, pending: Pending) -> None:
        """Accumulate without reducing. `.grad` becomes a tensor that knows of it, so clearing it
        clears this too.
        """
        self.drop_cleared()
        if self.partial is not None:
            self.partial.add_(grad)
            return
        self.partial = grad if grad.dtype == dtype else grad.to(dtype)
        self.mark_pending(pending)

    def mark_pending(self, pending: Pending) -> None:
        """`.grad` (made of zeros when there is none) stands for what is still to be reduced."""
        grad = self.sharded.grad
        if grad is None:
            grad = ShardTensor(self.local_zeros(), self.grad_spec, name=f"{self.name}.grad")
            self.sharded.grad = grad
        elif not isinstance(grad, ShardTensor):
            grad = ShardTensor(local_of(grad), spec_of(grad), name=f"{self.name}.grad")
            self.sharded.grad = grad
        grad._pending = pending
        self.partial_grad = grad

    def drop_cleared(self) -> bool:
        """Forget the partial gradient when `.grad` was set to None or replaced since. True when it
        was.
        """
        stood_for = self.partial_grad
        if stood_for is None or self.sharded.grad is stood_for:
            return False
        if stood_for._pending is not None:
            stood_for._pending.drop()
        self.forget_partial()
        return True

    def forget_partial(self) -> None:
        self.partial = None
        if self.partial_grad is not None:
            self.partial_grad._pending = None
            self.partial_grad = None


def _place_of(local: torch.Tensor) -> int:
    """Where its storage is; 0 for subclasses and devices without memory."""
    try:
        return local.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def make_parameter(
    local: torch.Tensor, spread: Spread, name: str, mark: Mark | None, requires_grad: bool = False
) -> nn.Parameter:
    """A parameter over a `ShardTensor` with `local` as this rank's part."""
    spec = spread.sharded_spec(local.dtype)
    tensor = ShardTensor(local.detach(), spec, mark=mark, name=name)
    return nn.Parameter(tensor, requires_grad=requires_grad)
