"""Which modules of a model become units.

What a unit is, is a trade: small units mean many collectives, each with its latency; large ones
mean much memory gathered at a time.

    "auto"    entries of lists and sequences that repeat a class (the blocks of a transformer).
              Neighbours whose bytes are fewer than a collective's latency is worth share a unit.
              Large modules that are left over (embedding, head) become units of their own when
              together they outweigh the largest block. Without such a list: by size
    names     class names, or patterns of module names ("layers.*", "*.mlp")
    a size    bytes ("32MiB" or a number): the largest modules that stay below it

What is left becomes the root's unit. Bytes are those of the stored parameters.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Sequence

import torch.nn as nn

from shardwise.units import parse_size

DEFAULT_UNIT_BYTES = 64 * 2**20

# A collective takes about 30 us beside its bytes on NVLink (100 GB/s: 3 MB), 200 us between CPU
# ranks (10 GB/s: 2 MB; benchmarks/fences.py measures it).
SMALL_UNIT_BYTES = 2 * 2**20

Group = list[str]  # names of the modules of one unit


def choose_units(model: nn.Module, unit: str | int | Sequence[str] = "auto") -> list[Group]:
    """Names of the modules of each unit, innermost units first; the root is left out."""
    if unit == "auto":
        return _auto(model)
    if isinstance(unit, bool):
        raise ValueError(f"unit: expected 'auto', names or a size, found {unit!r}")
    if isinstance(unit, int):
        return _alone(_by_bytes(model, unit))
    if isinstance(unit, str):
        size = parse_size(unit)
        return _alone(_by_names(model, [unit]) if size is None else _by_bytes(model, size))
    return _alone(_by_names(model, list(unit)))


def _alone(names: list[str]) -> list[Group]:
    return [[name] for name in names]


def _auto(model: nn.Module) -> list[Group]:
    blocks = _repeated_blocks(model)
    if not blocks:
        return _alone(_by_bytes(model, DEFAULT_UNIT_BYTES))
    groups = _merged(model, blocks)
    largest = max(_bytes_of(*map(model.get_submodule, group)) for group in groups)
    return _alone(_large_leftovers(model, blocks, largest)) + groups


def _merged(model: nn.Module, names: list[str]) -> list[Group]:
    """Neighbours of one list together, as long as they are small."""
    groups: list[Group] = []
    for name in reversed(names):  # in the order of the model
        parent = name.rpartition(".")[0]
        last = groups[-1] if groups else []
        if last and last[-1].rpartition(".")[0] == parent:
            together = _bytes_of(*map(model.get_submodule, [*last, name]))
            if together <= SMALL_UNIT_BYTES:
                last.append(name)
                continue
        groups.append([name])
    return groups[::-1]


def _large_leftovers(model: nn.Module, blocks: list[str], largest: int) -> list[str]:
    """Leaves outside of the blocks, when together they outweigh the largest unit: those of more
    than half its size. The root's own unit is gathered for the whole pass.
    """
    inside = {id(p) for name in blocks for p in model.get_submodule(name).parameters()}
    rest: dict[str, int] = {}
    seen = set(inside)
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(id(p) for p in own)
        if own and not any(_is_below(name, b) or name == b for b in blocks):
            rest[name] = sum(math.prod(p.shape) * p.element_size() for p in own)
    if sum(rest.values()) <= max(largest, SMALL_UNIT_BYTES):
        return []
    found = [n for n, size in rest.items() if n and size > max(largest / 2, SMALL_UNIT_BYTES)]
    return [n for n in found if _is_leaf(model.get_submodule(n))][::-1]


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


def _bytes_of(*modules: nn.Module) -> int:
    """Of their parameters, tied ones once."""
    params = {id(p): p for module in modules for p in module.parameters()}
    return sum(math.prod(p.shape) * p.element_size() for p in params.values())
