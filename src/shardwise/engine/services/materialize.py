"""From the meta device to real weights, unit by unit, never holding the whole model.

Shards are allocated first; then every module fills its own tensors as plain construction does:
through its `reset_parameters`, then through the `_init_weights(module)` of the nearest module
around it that has one (models of `transformers`). A random fill of a sharded parameter draws the
whole tensor on every rank and keeps the rank's part (`shard_tensor`), so one parameter at a time is
whole, and the weights are those of one process with the same seed, whatever the world size.

A buffer that no state dict holds (rotary tables, position ids) has no other source than this, so
one that nobody wrote is an error here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn as nn

from shardwise.engine.core.state import sharded_units, units_in
from shardwise.engine.guards.audit import holds_marks, mark_unfilled, meta_tensors

_INITIALISERS = ("reset_parameters", "init_weights", "init_parameters")
_OF_MODEL = "_init_weights"  # takes the module to fill; the model of `transformers` has it


@torch.no_grad()
def materialize(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    seed: int | None = None,
    init: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Give a sharded model on the meta device real, initialised weights. In place.

    Args:
        model: a model after `fully_shard`; parameters and buffers that are not on meta stay as
            they are.
        device: where buffers and ignored parameters go; by default the device of the mesh.
        seed: seed of the weights, the same on all ranks; the global RNG is left as it was. None
            draws from the global RNG.
        init: called with every module that holds parameters or buffers from meta, instead of its
            own `reset_parameters`, `init_weights` or `init_parameters`, and the model's
            `_init_weights`.

    Raises:
        RuntimeError: a module has no way to initialise what it holds, or leaves a buffer that is in
            no state dict; names modules, parameters and buffers.
    """
    sharded_units(model)
    waiting = waiting_modules(model)
    if init is None:
        check_initialisers(model, waiting)
        waiting = _with_containers(model, waiting)
    give_memory(model, device, waiting)
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        if init is None:
            initialise(model, waiting)
        else:
            for name in waiting:
                init(model.get_submodule(name))
    return model


def waiting_modules(model: nn.Module) -> dict[str, list[str]]:
    """{module: what it holds on meta}."""
    return {name: held for name, m in model.named_modules() if (held := _meta_names(m))}


def _meta_names(module: nn.Module) -> list[str]:
    held = [*module._parameters.items(), *module._buffers.items()]
    return [name for name, tensor in held if tensor is not None and tensor.is_meta]


def _with_containers(model: nn.Module, waiting: dict[str, list[str]]) -> dict[str, list[str]]:
    """Also modules that hold nothing themselves, all of it being on meta below them: an
    `_init_weights` may know a tensor by what is around it."""
    return {
        name: waiting.get(name, [])
        for name, module in model.named_modules()
        if name in waiting
        or (_owner(model, name) is not None and all(p.is_meta for p in module.parameters()))
    }


def check_initialisers(model: nn.Module, waiting: dict[str, list[str]]) -> None:
    """RuntimeError for a module that nothing could fill, before memory is given."""
    for name, held in waiting.items():
        if _own_initialiser(model.get_submodule(name)) is None and _owner(model, name) is None:
            raise RuntimeError(
                f"{name or type(model).__name__}: holds {', '.join(held)} on the meta "
                f"device and has none of {', '.join(_INITIALISERS)}, and no module around it has "
                f"{_OF_MODEL}; add one, assign computed buffers on a real device before, or pass "
                "init= to shardwise.materialize"
            )


def _own_initialiser(module: nn.Module) -> Callable[[], None] | None:
    for name in _INITIALISERS:
        method = getattr(module, name, None)
        if callable(method):
            return method
    return None


def _owner(model: nn.Module, name: str) -> str | None:
    """The module at `name` or nearest around it that fills modules by `_init_weights(module)`."""
    while True:
        method = getattr(model.get_submodule(name), _OF_MODEL, None)
        if callable(method) and _takes_one(method):
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]


def _takes_one(method: Callable[..., object]) -> bool:
    try:
        inspect.signature(method).bind(None)
    except TypeError:
        return False
    return True


def give_memory(
    model: nn.Module, device: torch.device | str | None, to_fill: Collection[str]
) -> None:
    """Memory for everything on meta; one tensor under two names stays one. What the modules
    `to_fill` hold is marked, so that the first forward refuses what nobody wrote."""
    marked = {id(model.get_submodule(name)) for name in to_fill}
    candidates = [(module, key) for module, key in meta_tensors(model) if id(module) in marked]
    if units := units_in(model):
        for unit in units:
            unit.materialize()
        device = device if device is not None else units[0].mesh.device
    made: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._buffers, module._parameters):
            for key, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        made[id(tensor)] = _empty(tensor, device or "cpu")
                    held[key] = made[id(tensor)]
    mark_unfilled(candidates)


def _empty(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


@torch.no_grad()
def initialise(model: nn.Module, waiting: dict[str, list[str]]) -> None:
    """Has modules, which have memory now, fill what they held on meta; see the module docstring.

    RuntimeError for a buffer that is in no state dict and was not written.
    """
    before = {f"{n}.{key}".removeprefix("."): b for n, key, b in _unsaved(model, waiting)}
    versions = {name: buffer._version for name, buffer in before.items()}

    def unfilled() -> list[str]:
        return [
            name
            for name, buffer in before.items()
            if model.get_buffer(name) is buffer and buffer._version == versions[name]
            if buffer.dtype in (torch.bool, torch.uint8) or holds_marks(buffer)
        ]

    for name, held in waiting.items():
        call, owner = _own_initialiser(model.get_submodule(name)), _owner(model, name)
        if held and call is not None and (owner is None or call.__name__ == _INITIALISERS[0]):
            call()
    for name in reversed(waiting):  # inner ones first, as `Module.apply` has it
        _fill_by_owner(model, name, name)
    for name in dict.fromkeys(n.rpartition(".")[0] for n in unfilled()):
        around = name.rpartition(".")[0]  # some models fill a child's table at its parent
        if name and around not in waiting:
            _fill_by_owner(model, name, around)
    if left := unfilled():
        raise RuntimeError(
            f"{', '.join(left[:8])}{' ...' if len(left) > 8 else ''}: buffers that are in no state "
            "dict, on the meta device, and no initialiser of their modules or of the model "
            f"({', '.join(_INITIALISERS)}, {_OF_MODEL}) writes them. Give the module a "
            "reset_parameters that computes them, or assign them on a real device before"
        )


def _fill_by_owner(model: nn.Module, name: str, at: str) -> None:
    owner = _owner(model, name)
    if owner is not None and len(at) >= len(owner):
        getattr(model.get_submodule(owner), _OF_MODEL)(model.get_submodule(at))


def _unsaved(
    model: nn.Module, waiting: dict[str, list[str]]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, held in waiting.items():
        module = model.get_submodule(name)
        for key in held:
            buffer = module._buffers.get(key)
            if buffer is not None and key in module._non_persistent_buffers_set:
                yield name, key, buffer
