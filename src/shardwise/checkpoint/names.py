"""Names of a model's tensors as files have them: without what is wrapped around its modules.

    layers.0._checkpoint_wrapped_module._orig_mod.a.weight  ->  layers.0.a.weight

Recomputation, `torch.compile` and DDP put a module around a module, in any order, and a run may
switch them between a save and a load. So saving and loading name things by the wrapped modules. A
part of a name is left out where the module there *is* such a wrapper, not because of how it reads:
a submodule that a model calls `module` stays. In files only names that are private to torch are
left out, and `module.` where all names have it and the model has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.source import Source
from shardwise.errors import CheckpointError

MODEL, OPTIM, GROUPS = "model.", "optim.", "optim.groups"
_WRAPPERS = {  # class: the name under which it holds what it wraps
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module"
    ),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "_fsdp_wrapped_module"
    ),
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
}
_DDP = "module"
_PRIVATE = set(_WRAPPERS.values()) - {_DDP}


def wrapped(module: nn.Module) -> str | None:
    """The name under which a wrapper holds its module; None for all other modules."""
    for kind in type(module).__mro__:
        if (held := _WRAPPERS.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            return held if held in module._modules else None
    return None


def canonical(model: nn.Module, name: str) -> str:
    """A name of a tensor or module of the model, as `state_dict` or `named_modules` has it."""
    return ".".join(part for part, _ in _walk(model, name))


def submodule(model: nn.Module, name: str) -> nn.Module:
    """The module of a canonical name."""
    modules = [model, *(module for _, module in _walk(model, name))]
    return _innermost(modules[-1], [])


def _walk(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a name that are no wrappers' (some take theirs out of `state_dict` themselves),
    each with the module there."""
    module, parts = model, name.split(".") if name else []
    while True:
        module = _innermost(module, parts)
        if not parts:
            return
        part = parts.pop(0)
        below = module._modules.get(part)
        module = below if below is not None else module
        yield part, module


def _innermost(module: nn.Module, parts: list[str]) -> nn.Module:
    while (held := wrapped(module)) is not None:
        if parts[:1] == [held]:
            parts.pop(0)
        inner = module._modules[held]
        assert inner is not None
        module = inner
    return module


def tensor_names(model: nn.Module) -> dict[str, str]:
    """{name in `state_dict()`: canonical name}; CheckpointError where two are one."""
    found = {name: canonical(model, name) for name in model.state_dict(keep_vars=True)}
    return unique(found, "the model")


def parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(p): canonical(model, name) for name, p in model.named_parameters()}


def unique(names: dict[str, str], where: str) -> dict[str, str]:
    """{old: new} where no two become one; else CheckpointError."""
    seen: dict[str, str] = {}
    for old, new in names.items():
        if (other := seen.setdefault(new, old)) != old:
            raise CheckpointError(f"{where}: {other} and {old} are both called {new} in files")
    return names


# -- what was saved with the names of wrappers ---------------------------------------------------
def unwrapped(source: Source, model: nn.Module) -> Source:
    """The source without the names of wrappers; itself where it has none."""
    own = tensor_names(model)
    known = {*own.values()}
    for name, _ in model.named_parameters(remove_duplicate=False):
        own[name] = canonical(model, name)
    keys = [*source.tensors, *source.ties, *source.objects]
    weights = [key.removeprefix(MODEL) for key in keys if key.startswith(MODEL)]
    is_exact = all(name in known for name in weights)
    of_ddp = f"{_DDP}." if not is_exact and all(n.startswith(f"{_DDP}.") for n in weights) else ""

    def new(name: str) -> str:
        if is_exact and name in known:
            return name
        return own.get(name) or without_private(name).removeprefix(of_ddp)

    names = {key: _renamed(key, new) for key in keys}
    if all(old == renamed for old, renamed in names.items()):
        return source
    return _Renamed(source, unique(names, str(source.path)), new)


def _renamed(key: str, new: Callable[[str], str]) -> str:
    if key.startswith(MODEL):
        return MODEL + new(key.removeprefix(MODEL))
    if key.startswith(OPTIM) and key != GROUPS:
        name, _, slot = key.removeprefix(OPTIM).rpartition(".")
        return f"{OPTIM}{new(name)}.{slot}"
    return key


def without_private(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _PRIVATE)


class _Renamed:
    """Another source's tensors under other keys."""

    def __init__(self, source: Source, names: Mapping[str, str], new: Any) -> None:
        self._source = source
        self.path: Path = source.path
        self._old = {names[k]: k for k in source.tensors}
        self.tensors: Mapping[str, TensorInfo] = {
            k: source.tensors[old] for k, old in self._old.items()
        }
        self.ties: Mapping[str, str] = {names[a]: names[k] for a, k in source.ties.items()}
        objects = {names[k]: v for k, v in source.objects.items()}
        if isinstance(groups := objects.get(GROUPS), list):
            objects[GROUPS] = [{**g, "params": [new(n) for n in g["params"]]} for g in groups]
        self.objects: Mapping[str, Any] = objects

    def read(self, key: str, box: Box, out: Tensor) -> None:
        self._source.read(self._old[key], box, out)

    def close(self) -> None:
        self._source.close()
