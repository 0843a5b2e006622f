"""Reads a source into models and optimizers, straight into the shards of this rank.

Names and shapes are compared first, and all differences come in one error, before anything is
changed. Then each rank reads the boxes that it holds: the peak is its shards and one piece (see
`source`). Nothing here communicates.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros
from torch.optim import Optimizer

from shardwise._torch_compat import local_of, spec_of
from shardwise.checkpoint import quantized
from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.names import parameter_names, submodule, unwrapped
from shardwise.checkpoint.placement import is_on_meta, local_part
from shardwise.checkpoint.source import CheckpointSource, Source, resolved
from shardwise.checkpoint.state import (
    GROUPS,
    MODEL,
    OPTIM,
    RNG,
    Optimizers,
    State,
    as_list,
)
from shardwise.engine.services.clip import mark_dirty
from shardwise.engine.tensor.shard_tensor import ShardTensor
from shardwise.errors import CheckpointError
from shardwise.offload import OffloadedOptimizer, SlotSource
from shardwise.owned import OwnedOptimizer

_EXTRA_STATE = "_extra_state"
_UNTIE = (
    ". Untie them in the model (tie_word_embeddings: false in the config.json of transformers), or "
    "leave one of the two in the files"
)


@dataclass(slots=True)
class Differences:
    """How a source and a model differ, in one report."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    recast: list[str] = field(default_factory=list)
    retied: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped or self.recast or self.retied)

    def __str__(self) -> str:
        parts = [
            ("missing from the checkpoint", self.missing),
            ("unknown to the model", self.unexpected),
            ("of another shape", self.reshaped),
            ("of another dtype", self.recast),
            ("one tensor in the model, two in the checkpoint", self.retied),
        ]
        text = "; ".join(f"{what}: {some(sorted(names))}" for what, names in parts if names)
        return f"{text}{_UNTIE}" if self.retied else text


def some(names: list[str], limit: int = 6) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def differences(source: Source, model: nn.Module, *, cast: bool = True) -> Differences:
    """Compares names and shapes (and dtypes unless `cast`) of a model with a source."""
    source = unwrapped(source, model)
    own = State()
    own.add_model(model)
    found = Differences()
    for key, tensor in own.tensors.items():
        name, stored = key.removeprefix(MODEL), resolved(source, key)
        if stored is None:
            aliases = [a for a, k in own.ties.items() if k == key and resolved(source, a)]
            stored = resolved(source, aliases[0]) if aliases else None
        if stored is None:
            found.missing.append(name)
            continue
        info = source.tensors[stored]
        if info.shape != tuple(tensor.shape):
            found.reshaped.append(f"{name} {info.shape} -> {tuple(tensor.shape)}")
        elif info.dtype != tensor.dtype and not cast:
            found.recast.append(f"{name} {info.dtype} -> {tensor.dtype}")
    known = own.tensors.keys() | own.ties.keys() | own.objects.keys()
    held = [*source.tensors, *source.ties, *source.objects]
    stray = sorted(k for k in held if k.startswith(MODEL) and k not in known)
    found.unexpected += [k.removeprefix(MODEL) for k in stray]
    absent = sorted(k for k in own.objects if k not in source.objects)
    found.missing += [k.removeprefix(MODEL) for k in absent]
    return found


def check_model(
    source: Source, model: nn.Module, *, strict: bool = True, cast: bool = False
) -> Differences:
    """What `load_model` refuses, before anything is changed."""
    found = differences(source, model, cast=cast)
    if found.reshaped or found.recast or (strict and found):
        raise CheckpointError(f"{source.path}: does not fit the model: {found}")
    return found


def load_model(
    source: Source, model: nn.Module, *, strict: bool = True, cast: bool = False
) -> Differences:
    """Fills a model. With `strict=False` what is missing or unexpected is returned, not refused;
    shapes and, unless `cast`, dtypes must fit anyway."""
    source = unwrapped(source, model)
    found = check_model(source, model, strict=strict, cast=cast)
    own = State()
    own.add_model(model)
    _check_on_device(own.tensors)
    for key, tensor in own.tensors.items():
        names = [key, *(alias for alias, target in own.ties.items() if target == key)]
        stored = sorted({s for n in names if (s := resolved(source, n)) is not None})
        if stored:
            fill(source, stored[0], tensor)
        for other in stored[1:]:
            if not holds(source, other, tensor):
                found.retied.append(f"{' = '.join(n.removeprefix(MODEL) for n in names)}")
    mark_dirty(model)
    if found.retied:
        raise CheckpointError(f"{source.path}: does not fit the model: {found}")
    _set_extra_state(source, model, own)
    return found


def _check_on_device(tensors: dict[str, Tensor]) -> None:
    waiting = [k.removeprefix(MODEL) for k, t in tensors.items() if is_on_meta(t)]
    if waiting:
        raise CheckpointError(
            f"the model is on the meta device ({some(waiting)}); call shardwise.materialize or "
            "model.to_empty before, or use shardwise.load_pretrained"
        )


def _set_extra_state(source: Source, model: nn.Module, own: State) -> None:
    for key in own.objects:
        if key in source.objects:
            name = key.removeprefix(MODEL).removesuffix(_EXTRA_STATE).removesuffix(".")
            submodule(model, name).set_extra_state(source.objects[key])


@torch.no_grad()
def fill(source: Source, key: str, tensor: Tensor) -> None:
    """Reads this rank's part of a tensor."""
    local, box, _ = local_part(tensor, key)
    source.read(key, box, local)


def holds(source: Source, key: str, tensor: Tensor) -> bool:
    """Whether this rank's part of `tensor` is what the source says."""
    local, box, _ = local_part(tensor, key)
    if source.tensors[key].shape != tuple(tensor.shape):
        return False
    other = torch.empty_like(local)
    source.read(key, box, other)
    return bool(((other == local) | (other != other) & (local != local)).all())


def files_to_read(source: CheckpointSource, model: nn.Module, rank: int) -> set[str]:
    """The files in which lies what this rank loads: its parts of parameters and of what optimizers
    keep for them, its random state, and whole what is laid out otherwise."""
    own, found = State(), set[str]()
    own.add_model(model)
    parts = {k: ((*t.shape,), local_part(t, k)[1]) for k, t in own.tensors.items()}
    for key, chunks in source.chunks.items():
        if key.startswith(RNG) and not key.startswith(f"{RNG}{rank}."):
            continue
        of_slot = key.startswith(OPTIM)
        owner = MODEL + key.removeprefix(OPTIM).rpartition(".")[0] if of_slot else key
        shape, part = parts.get(owner, (None, None))
        whole = source.tensors[key].shape
        wanted = part if part is not None and shape == whole else Box.whole(whole)
        found |= {c.file for c in chunks if c.box.meet(wanted) is not None}
    return found


# -- optimizers ----------------------------------------------------------------------------------
KEEPS_ITS_OWN = (OffloadedOptimizer, OwnedOptimizer)  # state is given to them by `put_state`


def load_optimizers(
    source: Source, model: nn.Module, optimizers: Optimizers, *, options: bool = True
) -> None:
    """Gives optimizers the state that the source has, and no other: a parameter without state in
    it has none afterwards. With `options`, groups take their learning rate and so on from the
    groups that held the same parameters."""
    source = unwrapped(source, model)
    names, many = parameter_names(model), as_list(optimizers)
    owned = {names[id(p)]: (o, g, p) for o, g, p in _owned(many) if id(p) in names}
    slots = _saved_slots(source, set(owned))
    groups = _matched_groups(source, many, names) if options else []
    state = {n: _slots_of(source, n, *owned[n], slots[n]) for n in owned if n in slots}
    for name, (optimizer, _, parameter) in owned.items():
        if isinstance(optimizer, KEEPS_ITS_OWN):
            continue
        optimizer.state.pop(parameter, None)
        if name in state:
            optimizer.state[parameter] = state[name]
    for optimizer in many:
        if isinstance(optimizer, KEEPS_ITS_OWN):
            own = {p: state[n] for n, (o, _, p) in owned.items() if o is optimizer and n in state}
            try:
                optimizer.put_state(own)
            except ValueError as error:
                raise CheckpointError(f"{source.path}: {error}") from None
    for group, saved in groups:
        group.update(saved)


def _owned(optimizers: list[Optimizer]) -> list[tuple[Optimizer, dict[str, Any], Tensor]]:
    return [(o, g, p) for o in optimizers for g in o.param_groups for p in g["params"]]


def _saved_slots(source: Source, owned: set[str]) -> dict[str, list[str]]:
    """{parameter: slots}; CheckpointError where state would be lost."""
    found: dict[str, list[str]] = {}
    for key in [*source.tensors, *source.objects]:
        if key.startswith(OPTIM) and key != GROUPS:
            name, _, slot = key.removeprefix(OPTIM).rpartition(".")
            found.setdefault(name, []).append(slot)
    if lost := sorted(found.keys() - owned):
        raise CheckpointError(
            f"{source.path}: holds optimizer state of parameters that the optimizer does not have "
            f"(frozen, or of another model?): {some(lost)}"
        )
    return found


def _slots_of(
    source: Source,
    name: str,
    optimizer: Optimizer,
    group: dict[str, Any],
    parameter: Tensor,
    slots: list[str],
) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for slot in slots:
        key = f"{OPTIM}{name}.{slot}"
        if quantized.MARK in slot:
            own = quantized.base_of(slot)
            if own not in made:
                made[own] = _quantized_slot(source, f"{OPTIM}{name}.{own}", optimizer, parameter)
            continue
        if key in source.objects:
            made[slot] = source.objects[key]
            continue
        if isinstance(optimizer, OffloadedOptimizer) and _is_streamed(
            source.tensors[key].shape, slot, optimizer, parameter
        ):
            made[slot] = SlotSource(functools.partial(_read_flat, source, key, parameter))
            continue
        if isinstance(optimizer, OwnedOptimizer):
            info = source.tensors[key]
            tensor = optimizer.empty_slot(parameter, info.shape, info.dtype)
        else:
            tensor = _empty_slot(source, key, group, parameter)
        fill(source, key, tensor)
        made[slot] = tensor
    return made


def _quantized_slot(source: Source, key: str, optimizer: Optimizer, parameter: Tensor) -> Tensor:
    if isinstance(optimizer, KEEPS_ITS_OWN):
        raise CheckpointError(
            f"{source.path}: {key} is kept in fewer bits, which {type(optimizer).__name__} does "
            "not take; use the optimizer that saved it, with shardwise.local_view"
        )
    return quantized.read_slot(source, key, parameter)


def _is_streamed(
    shape: tuple[int, ...], slot: str, optimizer: OffloadedOptimizer, parameter: Tensor
) -> bool:
    same = shape == tuple(parameter.shape)
    return same and bool(parameter.ndim or slot in optimizer.slots_of(parameter))


def _read_flat(source: Source, key: str, parameter: Tensor, start: int, out: Tensor) -> None:
    """Elements from `start` on of this rank's part: whole rows are read, once more where two pieces
    share one."""
    _, box, _ = local_part(parameter, key)
    if not out.numel():
        return
    if not box.size:
        source.read(key, box, out.view(()))
        return
    row = math.prod(box.size[1:])
    first, last = start // row, -(-(start + len(out)) // row)
    rows = torch.empty(last - first, *box.size[1:], dtype=out.dtype)
    source.read(key, box.rows(first, last), rows)
    skipped = start - first * row
    out.copy_(rows.view(-1)[skipped : skipped + len(out)])


def _empty_slot(source: Source, key: str, group: dict[str, Any], parameter: Tensor) -> Tensor:
    """A tensor for a slot: laid out like the parameter where it has its shape, else as it was."""
    info = source.tensors[key]
    if info.shape == tuple(parameter.shape) and (info.shape or info.dim is not None):
        return torch.zeros_like(parameter, dtype=info.dtype, requires_grad=False).detach()
    device = local_of(parameter).device if isinstance(parameter, DTensor) else parameter.device
    if not info.shape and not (group.get("capturable") or group.get("fused")):
        device = torch.device("cpu")  # step counts: where torch's optimizers keep them
    if info.dim is None or not isinstance(parameter, DTensor):
        return torch.zeros(info.shape, dtype=info.dtype, device=device)
    placements = [Shard(info.dim) if p.is_shard() else Replicate() for p in parameter.placements]
    made = zeros(
        *info.shape, dtype=info.dtype, device_mesh=parameter.device_mesh, placements=placements
    )
    return ShardTensor(local_of(made), spec_of(made)) if type(parameter) is ShardTensor else made


def _matched_groups(
    source: Source, optimizers: list[Optimizer], names: dict[int, str]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each group, the options of the saved groups that held its parameters."""
    saved = {n: g["options"] for g in source.objects.get(GROUPS, ()) for n in g["params"]}
    found = []
    for position, group in enumerate(g for o in optimizers for g in o.param_groups):
        here = [names[id(p)] for p in group["params"] if id(p) in names]
        options = [saved[n] for n in here if n in saved]
        if not options:
            continue
        if any(str(o) != str(options[0]) for o in options):
            raise CheckpointError(
                f"{source.path}: the parameters of group {position} ({some(here)}) were in groups "
                "with different options; group them as before, or load with options=False"
            )
        found.append((group, options[0]))
    return found
