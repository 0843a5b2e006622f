"""`FSDPModule`: what a module is after `fully_shard`, and the state that it carries.

The class of the module is swapped for `FSDP<Name>`, a subclass of `FSDPModule` and of the original
class, on that module only; names of modules and parameters do not change. `__call__` runs the
forward through the engine; the rest are the methods that FSDP2 documents.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn as nn
from torch.nn.utils.parametrize import is_parametrized

from shardwise._torch_compat import (
    frame_callback,
    graph_task,
    register_composable,
    with_frame_callback,
)
from shardwise.engine.core.build import own_modules
from shardwise.engine.core.call import run as run_call
from shardwise.engine.core.context import Context
from shardwise.engine.core.state import (
    STATE,
    ModuleState,
    sharded_modules,
    state_of,
    unit_of,
    units_in,
)
from shardwise.engine.core.unit import Unit
from shardwise.engine.core.upkeep import catch_up, refresh
from shardwise.engine.guards.audit import (
    check_filled,
    check_owned,
    mark_unfilled,
    meta_tensors,
    tell_ignored,
)
from shardwise.engine.guards.changes import REGISTRATIONS, check_nothing_added, take_in_changes
from shardwise.engine.guards.forms import forget_forms, watch_forms
from shardwise.engine.guards.optimizers import repoint_all
from shardwise.engine.guards.views import watch_attributes
from shardwise.engine.services.copies import copy_attributes, copy_unit
from shardwise.engine.services.writers import writers_of
from shardwise.engine.settings import UnitSettings
from shardwise.errors import EngineError

_CLASSES: dict[type, type] = {}
_NOT_TAKEN_ALONG = ("__dict__", "__weakref__", "__deepcopy__")  # of a parametrized class
_also: list[type] = []  # see `count_as`


class UnshardHandle:
    """Returned by `unshard(async_op=True)`."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """The full parameters may be used from here on. Waiting twice is harmless."""
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.finish_user_unshard()


class FSDPModule(UnitSettings):
    """Mixin of sharded modules; see the module docstring."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Building another one (slicing a Sequential does) gives a plain module of the original
        class.
        """
        original = cls.__mro__[cls.__mro__.index(UnitSettings) + 1]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state: ModuleState = self.__dict__[STATE]
        if not state.is_known or state.registrations != REGISTRATIONS.count:
            torch.compiler.disable(adopt)(cast(nn.Module, self))
        call = super().__call__  # type: ignore[misc]
        callback = frame_callback()
        if callback is not None:  # torch.compile around the model
            run = torch.compiler.disable(_run_outside_graphs)
            out = run(state, call, callback, args, kwargs)
        else:
            out = run_call(state.unit, state.around, call, args, kwargs)
        if state.registrations != REGISTRATIONS.count:
            _check_nothing_added(state)
        return out

    # -- full parameters -------------------------------------------------------------------------
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters and register them, until `reshard()` or the next forward
        and backward.

        Args:
            async_op: return a handle at once; its `wait()` must be called before the parameters
                are used.
        """
        adopt_if_new(self)
        unit = unit_of(self)
        unit.start_user_unshard()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Register the sharded parameters and free the gathered ones."""
        unit = unit_of(self)
        unit.gradients.agree_on_flags()
        catch_up(unit)
        unit.reshard()

    # -- nn.Module and state ---------------------------------------------------------------------
    def reset_iter_state(self) -> None:
        """Forget a pass that an exception ended. The next forward does the same by itself."""
        unit_of(self).context.abandon()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, those of units too that are gathered and so show full parameters."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in units_in(self):
            for param in unit.params:
                grad = param.sharded.grad
                if grad is not None and set_to_none:
                    param.sharded.grad = None
                elif grad is not None:
                    grad.zero_()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`to`, `to_empty`, `float`, ...: work on the shards, then pick up what they became."""
        unit = unit_of(self)
        catch_up(unit, check_ties=False)
        unit.reshard()
        on_meta = meta_tensors(cast(nn.Module, self))
        out = super()._apply(*args, **kwargs)  # type: ignore[misc]
        mark_unfilled(on_meta)
        refresh(unit, check_ties=False)
        return out

    @torch.inference_mode(False)
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """In an evaluation too: `torch.inference_mode` would refuse to detach shards."""
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        unit_of(self).reshard_for_state_dict()
        super()._save_to_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        unit_of(self).reshard_for_state_dict()
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    def __copy__(self) -> Any:
        """Another module over the same parameters, sub-modules and unit."""
        new = object.__new__(type(self))
        state = new.__dict__[STATE] = copy.copy(self.__dict__[STATE])
        new.__dict__.update({**self.__dict__, STATE: state})
        state.original = self
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EngineError(
            f"{unit_of(self).name}: a sharded {type(self).__name__} cannot be pickled; save "
            "model.state_dict() on each rank, or by CheckpointManager, or copy.deepcopy the model"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that is sharded alike, with units and shards of its own; no communication."""
        module, state = cast(nn.Module, self), self.__dict__[STATE]
        state.unit.reshard()
        new = object.__new__(type(module))
        waiting = memo.setdefault(id(STATE), [])
        is_outermost = not waiting
        waiting.append((state, new))
        copy_attributes(module, new, STATE, memo)
        # Units are built innermost first, once all modules are copied: ties reach across units.
        for source, target in list(reversed(waiting)) if is_outermost else ():
            unit = copy_unit(source.unit, memo)
            if unit is not None:
                waiting.remove((source, target))
                settle(target, source.on(unit))
                for name in source.methods:
                    target.__dict__.pop(name, None)
                    register_fsdp_forward_method(target, name)
        return new


def _run_outside_graphs(
    state: ModuleState, call: Any, callback: Any, args: Any, kwargs: Any
) -> Any:
    """One call below a `torch.compile`: the engine is not traced, the module's own forward is."""
    call = with_frame_callback(callback, call)
    return run_call(state.unit, state.around, call, args, kwargs)


# -- swapping, adopting --------------------------------------------------------------------------
def swap_class(module: nn.Module, state: ModuleState) -> None:
    """Make `module` an `FSDP<Name>` that carries `state`."""
    cls = type(module)
    if is_parametrized(module):  # torch puts such a class on top, and takes it off there again
        members = {k: v for k, v in vars(cls).items() if k not in _NOT_TAKEN_ALONG}
        swapped = type(f"FSDP{cls.__name__}", (_swapped(cls.__bases__[0]),), members)
    else:
        swapped = _swapped(cls)
    module.__class__ = swapped
    settle(module, state)


def _swapped(cls: type) -> type:
    swapped = _CLASSES.get(cls)
    if swapped is None:
        bases = (FSDPModule, cls, *_also)
        members = {"__module__": cls.__module__, **writers_of(cls)}
        swapped = type(f"FSDP{cls.__name__}", bases, members)
        _CLASSES[cls] = swapped
    return swapped


def settle(module: nn.Module, state: ModuleState) -> None:
    """Let a module carry its state, and its unit know the module."""
    module.__dict__[STATE] = state
    state.unit.modules.append(weakref.ref(module))
    register_composable(module, "fully_shard")


def count_as(also: tuple[type, ...]) -> None:
    """Let all sharded modules, those that are sharded already too, be instances of further classes.

    They stand behind the original class and `nn.Module`, so nothing of theirs takes precedence.
    """
    _also[:] = also
    for cls, swapped in _CLASSES.items():
        swapped.__bases__ = (FSDPModule, cls, *also)


def is_in_use() -> bool:
    """Whether any module has been sharded in this process."""
    return bool(_CLASSES)


def adopt_if_new(module: Any) -> None:
    state = state_of(module)
    if state is None:
        return
    if not state.is_known or state.registrations != REGISTRATIONS.count:
        adopt(module)


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _check_nothing_added(state: ModuleState) -> None:
    if state.unit.context.depth == 0:
        check_nothing_added(state.unit.context.units, _is_sharded)


def _is_at_rest(unit: Unit) -> bool:
    return unit.context.depth == 0 and unit.context.backward is None and graph_task() is None


def adopt(root: nn.Module) -> None:
    """Take the units of all modules below `root` into one context, name them, and check the whole
    before it trains.
    """
    root_state = state_of(root)
    assert root_state is not None
    if root_state.is_known and not _is_at_rest(root_state.unit):
        return  # registrations in the middle of a pass are for the next one
    context = Context()
    below = list(sharded_modules(root))
    units = list({id(s.unit): s.unit for _, _, s in below}.values())
    changed = [u for u in units if _is_at_rest(u) and take_in_changes(u, units, _is_sharded)]
    count = REGISTRATIONS.count
    if all(u.is_adopted for u in units) and len({id(u.context) for u in units}) == 1:
        for _, _, state in below:
            state.is_known = True  # another module of its list was called before
        for unit in units:
            if _is_at_rest(unit):
                catch_up(unit)
        _name_parameters(root)
        _check_materialized(root)
        _check_owned(root, root_state.unit.context)
        if changed:
            repoint_all()
        _watch_attributes(below)
        for _, _, state in below:
            state.registrations = count
        return
    named: set[int] = set()
    for name, module, state in below:
        if _is_at_rest(state.unit):
            refresh(state.unit)
        if id(state.unit) not in named:
            named.add(id(state.unit))
            state.unit.is_root = module is root
            state.unit.name = name or "(root)"
    context.take_in(units)
    _name_parameters(root)
    _check_materialized(root)
    check_filled(root)
    _check_owned(root, context)
    repoint_all()
    _watch_attributes(below)
    for _, _, state in below:  # not before: a check that has raised is made again
        state.is_known = state.unit.is_adopted = True
        state.registrations = count


def _watch_attributes(below: list[tuple[str, nn.Module, ModuleState]]) -> None:
    modules: dict[Unit, list[tuple[str, nn.Module]]] = {}
    for name, module, state in below:
        own = own_modules(module, f"{name}." if name else "", _is_sharded)
        modules.setdefault(state.unit, []).extend((n.removesuffix("."), m) for n, m in own)
    for unit, named in modules.items():
        watch_attributes(unit, named)
        forget_forms(unit)
    for module in below[0][1].modules():
        # Evaluated, it hands parameters of modules below to one kernel, unless a hook is set.
        fuses = isinstance(module, nn.TransformerEncoderLayer) and not module._forward_pre_hooks
        if fuses and any(map(state_of, list(module.modules())[1:])):
            module.register_forward_pre_hook(_no_kernel)
    watch_forms(below[0][1].modules())  # the root's


def _no_kernel(_module: nn.Module, _args: Any) -> None:
    """A hook that does nothing."""


def _name_parameters(root: nn.Module) -> None:
    """By their places: `functional_call` may have put other tensors there."""
    names: dict[tuple[int, str], tuple[int, str]] = {}
    for prefix, module in root.named_modules():
        for key in module._parameters:
            name = f"{prefix}.{key}" if prefix else key
            names[id(module._parameters), key] = len(names), name
    for unit in units_in(root):
        for param in unit.params:
            found = [n for d, key in param.slots if (n := names.get((id(d), key))) is not None]
            if found:
                param.rename(min(found)[1])  # a tied one has the name of its first place
        for i, bucket in enumerate(unit.buckets):
            if bucket.bucket is not None:
                bucket.bucket.name = f"{unit.name}[{i}]"


def _check_materialized(root: nn.Module) -> None:
    missing = [n for n, p in root.named_parameters() if p.is_meta]
    if missing:
        raise RuntimeError(
            f"parameters are still on the meta device: "
            f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}; "
            "call shardwise.materialize(model, device=...), or model.to_empty(device=...) and "
            "initialise or load them, "
            "before the first forward"
        )


def _check_owned(root: nn.Module, context: Context) -> None:
    params = [p for u in context.units for p in u.params]
    owned = {id(t) for p in params for t in (p.sharded, p.full, p.between)}
    owned |= {id(s[0].get(s[1])) for u in context.units for b in u.buckets for s in b.guest_slots}
    data_ranks = {r for u in context.units for axis in u.mesh.axes for r in axis.ranks}
    ignored = {i for u in context.units for i in u.ignored}
    check_owned(root, owned, ignored, data_ranks)
    tell_ignored(root, ignored, data_ranks)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module.method_name(...)` run like `forward`: parameters gathered before, released after.

    Does nothing on modules that are not sharded, as in torch.

    Args:
        module: a sharded module.
        method_name: one of its methods.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r} to register")
    method: Callable[..., Any] = getattr(module, method_name)
    inner = getattr(method, "__func__", method)
    ref = weakref.ref(cast(nn.Module, module))

    @functools.wraps(inner)
    def run_method(*args: Any, **kwargs: Any) -> Any:
        self = ref()
        assert self is not None
        adopt_if_new(self)
        bound = inner.__get__(self) if hasattr(method, "__func__") else inner
        return run_call(unit_of(self), None, bound, args, kwargs)

    setattr(module, method_name, run_method)
    state = state_of(module)
    assert state is not None
    state.methods.append(method_name)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots share streams and transports. They do so without it: units of one mesh
    share a transport, units of one device share its streams. So only the argument is checked.

    Args:
        modules: sharded modules, e.g. the stages of a pipeline on this rank.
    """
    for module in modules:
        if state_of(module) is None:
            raise ValueError(
                f"share_comm_ctx: expected a list of FSDPModules, found {type(module).__name__}; "
                "call fully_shard on it"
            )
