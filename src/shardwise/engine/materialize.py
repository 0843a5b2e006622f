"""From the meta device to real weights, unit by unit, never holding the whole model.

Shards are allocated first; then every module fills its own parameters through its usual
`reset_parameters`. A random fill of a sharded parameter draws the whole tensor on every rank and
keeps the rank's part (`shard_tensor`), so one parameter at a time is whole, and the weights are
those of one process with the same seed, whatever the world size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn

from shardwise.engine.state import sharded_units

_INITIALISERS = ("reset_parameters", "init_weights", "init_parameters")


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
            own `reset_parameters`, `init_weights` or `init_parameters`.

    Raises:
        RuntimeError: a module has no way to initialise what it holds; names module and parameters.
    """
    units = sharded_units(model)
    target = torch.device(device) if device is not None else units[0].mesh.device
    waiting = {name: held for name, m in model.named_modules() if (held := _meta_names(m))}
    for name in waiting:
        if init is None and module_initialiser(model.get_submodule(name)) is None:
            raise RuntimeError(
                f"{name or type(model).__name__}: holds {', '.join(waiting[name])} on the meta "
                f"device and has none of "
                f"{', '.join(_INITIALISERS)}; add one, or pass init="
            )
    for unit in units:
        unit.materialize()
    for name in waiting:
        _empty_rest(model.get_submodule(name), target)
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        for name in waiting:
            module = model.get_submodule(name)
            call = init if init is not None else module_initialiser(module)
            assert call is not None
            call(module) if init is not None else call()  # type: ignore[call-arg]
    return model


def _meta_names(module: nn.Module) -> list[str]:
    held = [*module._parameters.items(), *module._buffers.items()]
    return [name for name, tensor in held if tensor is not None and tensor.is_meta]


def module_initialiser(module: nn.Module) -> Callable[[], None] | None:
    """How a module fills its own tensors; None if it has no way."""
    for name in _INITIALISERS:
        method = getattr(module, name, None)
        if callable(method):
            return method
    return None


def _empty_rest(module: nn.Module, device: torch.device) -> None:
    """Buffers, and parameters that no unit owns."""
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device)
    for key, param in module._parameters.items():
        if param is not None and param.is_meta:
            empty = torch.empty_like(param, device=device)
            module._parameters[key] = nn.Parameter(empty, requires_grad=param.requires_grad)
