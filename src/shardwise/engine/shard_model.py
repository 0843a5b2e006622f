"""`shard_model`: apply `fully_shard` bottom-up to the right modules of a whole model.

What a unit is, is a trade: small units mean many small collectives, large ones mean much memory
    gathered at a time.

    "auto"           entries of module lists and sequences that repeat a class (the blocks of a "
    "transformer); a model
                     without such a list is cut by bytes
    names            class names, or patterns of module names ("layers.*", "*.mlp")
    a size           bytes ("32MiB" or a number): the largest modules that stay below it

What is left over (embedding, final norm, head) becomes the root's unit.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.transport import Transport
from shardwise.engine.api import fully_shard
from shardwise.engine.module import FSDPModule
from shardwise.engine.state import state_of
from shardwise.layout import MixedPrecisionPolicy, OffloadPolicy, Strategy

DEFAULT_UNIT_BYTES = 64 * 2**20
_SIZES = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


def shard_model(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str | Strategy | None = None,
    unit: str | int | Sequence[str] = "auto",
    transport: str | Transport = "auto",
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    reshard_after_forward: bool | int | None = None,
    activation_checkpointing: bool = False,
) -> Any:
    """Shard a whole model in place: `fully_shard` on its units, innermost first, then on the model.

    Args:
        model: the model, on a real device or on meta (then call `materialize` afterwards).
        mesh, strategy, transport, mp_policy, offload_policy, ignored_params,
            reshard_after_forward: as in `fully_shard`.
        unit: "auto", class names or name patterns, or a size in bytes; see the module docstring.
        activation_checkpointing: recompute every unit's forward in the backward. The recomputation
            runs inside the unit, so its parameters are gathered twice a step as without it.

    Returns:
        `model`, now also an `FSDPModule`.
    """
    chosen = choose_units(model, unit)
    settings: dict[str, Any] = {
        "mesh": mesh,
        "strategy": strategy,
        "transport": transport,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "reshard_after_forward": reshard_after_forward,
    }
    for module in [model.get_submodule(name) for name in chosen]:
        if isinstance(module, FSDPModule):
            continue
        fully_shard(module, **settings)
        state = state_of(module)
        assert state is not None
        state.recompute = activation_checkpointing
    if not isinstance(model, FSDPModule):
        fully_shard(model, **settings)
    return model


def choose_units(model: nn.Module, unit: str | int | Sequence[str] = "auto") -> list[str]:
    """Names of the modules that become units of their own, innermost first; the root is left
    out.
    """
    if isinstance(unit, int) and not isinstance(unit, bool):
        return _by_bytes(model, unit)
    if isinstance(unit, str):
        if unit == "auto":
            return _repeated_blocks(model) or _by_bytes(model, DEFAULT_UNIT_BYTES)
        size = parse_size(unit)
        if size is not None:
            return _by_bytes(model, size)
        return _by_names(model, [unit])
    if isinstance(unit, int):
        raise ValueError(f"unit: expected 'auto', names or a size, found {unit!r}")
    return _by_names(model, list(unit))


def parse_size(text: str) -> int | None:
    """Bytes of "32MiB", "1.5 GB", "4096"; None when it is no size."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _SIZES:
        return None
    return int(float(match[1]) * _SIZES[match[2].lower()])


def _repeated_blocks(model: nn.Module) -> list[str]:
    """Entries of the outermost lists in which one class occurs twice or more."""
    chosen: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(
            _is_below(name, c) for c in chosen
        ):
            continue
        counts = Counter(type(child) for child in module)
        for key, child in module.named_children():
            if (
                counts[type(child)] >= 2
                and any(True for _ in child.parameters())
                and not _is_leaf(child)
            ):
                chosen.append(f"{name}.{key}" if name else key)
    return chosen[::-1]


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _is_below(name: str, parent: str) -> bool:
    return name.startswith(f"{parent}.")


def _by_names(model: nn.Module, wanted: Sequence[str]) -> list[str]:
    chosen: list[str] = []
    used: set[str] = set()
    for name, module in model.named_modules():
        if not name or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        classes = {c.__name__ for c in type(module).__mro__}
        hits = [w for w in wanted if w in classes or fnmatch.fnmatchcase(name, w)]
        if hits:
            chosen.append(name)
            used.update(hits)
    missing = [w for w in wanted if w not in used]
    if missing:
        classes = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(
            f"unit: nothing in {type(model).__name__} has the class or name "
            f"{', '.join(map(repr, missing))}; classes in "
            f"it: {', '.join(classes)}"
        )
    return chosen[::-1]


def _by_bytes(model: nn.Module, limit: int) -> list[str]:
    """The largest modules of at most `limit` bytes; what is tiny (below a sixteenth) stays with
    its parent.
    """
    if limit < 1:
        raise ValueError(f"unit: a size must be positive, found {limit}")
    chosen: list[str] = []
    seen: set[int] = set()

    def visit(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            child_name = f"{name}.{key}" if name else key
            if id(child) in seen:
                continue
            seen.add(id(child))
            size = _bytes_of(child)
            is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if size > limit or is_container:
                visit(child, child_name)
                if size > limit and _is_leaf(child):
                    chosen.append(child_name)  # one large matrix: a unit of its own
            elif size * 16 >= limit:
                chosen.append(child_name)

    visit(model, "")
    return chosen[::-1]


def _bytes_of(module: nn.Module) -> int:
    return sum(math.prod(p.shape) * p.element_size() for p in module.parameters())
