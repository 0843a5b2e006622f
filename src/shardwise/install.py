"""`install()`: programs that import torch's FSDP2 get shardwise, unchanged, and `uninstall()`.

    import shardwise
    shardwise.install()          # or: with shardwise.install(): ...
    import train                 # does `from torch.distributed.fsdp import fully_shard`

    torchrun --nproc-per-node 2 -m shardwise.install train.py --its arguments

What changes in the process, until `uninstall()`:

names       the public names of FSDP2 mean ours, in torch's modules and in every module that has
            imported them already (global names, found by identity, under whatever alias).
            References in closures, class bodies and containers are out of reach
FSDPModule  torch's class stays what it is and becomes a base class of all sharded modules, behind
            `nn.Module`: `isinstance` answers for ours and for torch's own, whoever asks
state       `fully_shard.state(module)` gives what torch's pipelining needs to reduce once per step

A process in which nothing was sharded says so at its end: Accelerate and the Trainer of
transformers take DDP, without a word, where there is no accelerator.

This is the only file that may import torch's FSDP, and it does so for the names alone.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import types
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

NAMES = (
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)
PLACES = (  # where torch offers the names; places that its version lacks are passed over
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
# Torch's implementation goes on with torch's names: modules that it has sharded need them.
IMPLEMENTATION = (
    "torch.distributed.fsdp._fully_shard.",
    "torch.distributed._composable.replicate_with_fsdp",
    "shardwise",
)
USAGE = "usage: python -m shardwise.install [-m MODULE | SCRIPT.py] [arguments of the program ...]"


class _Binding(NamedTuple):
    """One global name that was changed."""

    module: types.ModuleType
    name: str
    original: Any
    ours: Any


_bindings: list[_Binding] = []
_known: set[str] = set()  # modules that existed at install()


class Installed:
    """What `install()` returns. As a context manager it uninstalls, unless an outer one is
    active.
    """

    def __init__(self, is_first: bool) -> None:
        self._is_first = is_first

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_first:
            uninstall()


def install() -> Installed:
    """Let torch's FSDP2 names mean shardwise in this process; see the module docstring.

    A second call looks again for modules that hold torch's names; a single `uninstall()` undoes
    all. Modules that torch's own `fully_shard` has sharded before keep working.
    """
    is_first = not is_installed()
    replacements = _replacements()
    if is_first:
        from shardwise.engine.module import count_as

        atexit.register(_say_if_nothing_was_sharded)
        _known.clear()
        _known.update(sys.modules)
        count_as((import_module(PLACES[0]).FSDPModule,))
        replacements["fully_shard"][1].state = _state_getter(replacements["fully_shard"][0])
    for module, name, value in list(_globals()):
        for original, ours in replacements.values():
            if value is original:
                setattr(module, name, ours)
                _bindings.append(_Binding(module, name, original, ours))
    return Installed(is_first)


def uninstall() -> None:
    """Undo `install()`. Does nothing when nothing is installed.

    Modules of torch that were imported meanwhile get torch's names too. Other modules that were
    imported meanwhile keep ours: whether they took them from torch or from shardwise, nobody knows.
    Models that are sharded stay what they are.
    """
    if not is_installed():
        return
    from shardwise.engine.module import count_as

    atexit.unregister(_say_if_nothing_was_sharded)
    while _bindings:
        module, name, original, ours = _bindings.pop()
        if vars(module).get(name) is ours:
            setattr(module, name, original)
    replacements = _replacements()
    for module, name, value in list(_globals()):
        if module.__name__ in _known or not module.__name__.startswith("torch."):
            continue
        for original, ours in replacements.values():
            if value is ours:
                setattr(module, name, original)
    count_as(())
    del replacements["fully_shard"][1].state


def is_installed() -> bool:
    """Whether `install()` is in force."""
    return bool(_bindings)


def _say_if_nothing_was_sharded(is_program: bool = False) -> None:
    """At the end of the process, on one of its ranks."""
    from shardwise.engine.module import is_in_use

    dist = sys.modules.get("torch.distributed")
    is_rank = "RANK" in os.environ or (dist is not None and dist.is_initialized())
    if is_in_use() or os.environ.get("RANK", "0") != "0" or not (is_rank or is_program):
        return
    why = "fully_shard was never called in this process"
    if "accelerate" in sys.modules:
        why += "; Accelerate and the Trainer take DDP where there is no accelerator"
    print(f"shardwise.install: nothing was sharded: {why}", file=sys.stderr, flush=True)


# -- names ---------------------------------------------------------------------------------------
def _replacements() -> dict[str, tuple[Any, Any]]:
    """Name -> (torch's, ours), for the names that both have."""
    import shardwise

    implementation = import_module(PLACES[1])
    for place in PLACES:
        import_module(place)
    both = (n for n in NAMES if hasattr(implementation, n) and hasattr(shardwise, n))
    return {n: (_original(n, implementation), getattr(shardwise, n)) for n in both}


def _original(name: str, implementation: types.ModuleType) -> Any:
    """Torch's own, also while ours stands in its place."""
    for binding in _bindings:
        if binding.name == name and binding.module is implementation:
            return binding.original
    return getattr(implementation, name)


def _globals() -> Iterator[tuple[types.ModuleType, str, Any]]:
    """The global names of all modules that are loaded, without torch's implementation."""
    for key, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or key.startswith(IMPLEMENTATION):
            continue
        for name, value in list(vars(module).items()):
            yield module, name, value


# -- what torch's pipelining asks for ------------------------------------------------------------
class _Group:
    """A unit, as far as torch's pipelining looks at a parameter group."""

    def post_backward(self) -> None:
        """Nothing: `_root_post_backward_final_callback`, which follows, reduces all units, in an
        order that is the same on all ranks.
        """


class _State:
    """What `fully_shard.state(module)` stands for."""

    def __init__(self, module: Any, root: _State | None = None) -> None:
        from shardwise.engine.core.state import unit_of
        from shardwise.engine.module import adopt_if_new

        adopt_if_new(module)
        self._module = module
        self._context = unit_of(module).context
        self._fsdp_param_groups = [_Group()]
        self._state_ctx = self

    @property
    def all_states(self) -> list[_State]:
        """One for the module, one for each sharded module below it."""
        from shardwise.engine.core.state import sharded_modules

        return [
            self if m is self._module else _State(m) for _, m, _ in sharded_modules(self._module)
        ]

    def _root_post_backward_final_callback(self) -> None:
        self._context.reduce_partials()


def _state_getter(original: Any) -> Any:
    from shardwise.engine.core.state import state_of

    def state(module: Any) -> Any:
        """What torch's `fully_shard.state(module)` gives, for our modules and for torch's."""
        return original.state(module) if state_of(module) is None else _State(module)

    return state


# -- as a program --------------------------------------------------------------------------------
def main(arguments: Sequence[str]) -> None:
    """Run a script or module under `install()`, as `python SCRIPT` or `python -m MODULE` would."""
    program = list(arguments)
    as_module = program[:1] == ["-m"]
    if as_module:
        del program[0]
    if not program or program[0].startswith("-"):
        sys.exit(USAGE)
    if not as_module and not Path(program[0]).exists():
        sys.exit(f"shardwise.install: {program[0]}: no such file")
    install()
    atexit.unregister(_say_if_nothing_was_sharded)
    atexit.register(_say_if_nothing_was_sharded, is_program=True)
    sys.argv = program
    if as_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


class _CallableModule(types.ModuleType):
    """`shardwise.install` names this module as soon as somebody imports it; calling works then
    too.
    """

    def __call__(self) -> Installed:
        return install()


if __name__ == "__main__":
    # The module that programs import, not this second copy of it, keeps what was changed.
    import_module("shardwise.install").main(sys.argv[1:])
else:
    sys.modules[__name__].__class__ = _CallableModule
