"""Sources made of tensors in memory or in memory maps: state dicts, `torch.save` files.

    {name: tensor}                                                 weights
    {"model": {...}, "optimizer": {"state": {name: {...}}, ...}}   optimizer state by names too, as
                                                                   get_state_dict and FSDP1 have it

Optimizer state under numbers is refused: which parameter a number means is known only to the code
that made the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.bounded import short
from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.said import Record, Said
from shardwise.checkpoint.state import EXTRA, GROUPS, MODEL, OPTIM
from shardwise.checkpoint.torch_file import load_torch
from shardwise.errors import CheckpointError

MODEL_ROOTS = ("model", "state_dict", "model_state_dict", "module", "network")
OPTIM_ROOTS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizers")


class TensorSource:
    """Whole tensors by key, other names of them, values."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], objects: dict[str, Any]) -> None:
        self.path, self.objects = path, objects
        self.ties: dict[str, str] = {}
        self.held: dict[str, Tensor] = {}
        seen: dict[tuple[Any, ...], str] = {}
        for key, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                raise CheckpointError(f"{path}: {key}: is a DTensor; give whole tensors")
            at = tensor.data_ptr() if tensor.numel() else id(tensor)
            place = (at, tensor.shape, tensor.dtype, tensor.stride())
            if place in seen:  # one tensor under two names
                self.ties[key] = seen[place]
            else:
                seen[place] = key
                self.held[key] = tensor.detach()
        self.tensors = {k: TensorInfo(t.dtype, tuple(t.shape)) for k, t in self.held.items()}

    def read(self, key: str, box: Box, out: Tensor) -> None:
        out.copy_(self.held[key][box.slices_in(Box.whole(self.tensors[key].shape))])

    def close(self) -> None:
        self.held = {}


def torch_source(path: Path) -> TensorSource:
    """A `torch.save` file."""
    said, found = Said(load_torch(path, str(path)), str(path)), Found(str(path))
    for keys, leaf in _leaves(said.of(dict), ()):
        key = our_key(keys, str(path))
        found.add(key, keys, leaf, isinstance(leaf, Tensor) and not key.startswith(GROUPS))
    return TensorSource(path, found.weights(), found.values())


class Found:
    """Tensors and values under our keys, where they were found. Nested names are joined by dots, so
    two may come to have one key: an error, never the last one."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._tensors: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}

    def add(self, key: str, path: tuple[Any, ...], value: Any, is_tensor: bool) -> None:
        if (other := self._paths.setdefault(key, path)) is not path:
            raise CheckpointError(
                f"{self._where}: {short(other)} and {short(path)} would both become {key}; rename "
                "one, or save only one of them"
            )
        (self._tensors if is_tensor else self._objects)[key] = value

    def weights(self) -> dict[str, Any]:
        """The tensors. A state dict without a root holds nothing but weights: then `extra.` means
        `model.`."""
        if any(k.startswith(MODEL) for k in self._tensors):
            return self._tensors
        return {
            MODEL + k.removeprefix(f"{EXTRA}.") if k.startswith(f"{EXTRA}.") else k: v
            for k, v in self._tensors.items()
        }

    def values(self) -> dict[str, Any]:
        return collect_objects(self._objects, self._where)


def _leaves(value: Any, path: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]]:
    if not isinstance(value, dict) or not value or path[-1:] == ("param_groups",):
        return [(path, value)]
    if any(isinstance(key, Record) for key in value):
        raise CheckpointError(f"{short(path)}: has a key that is no simple value")
    return [leaf for k, v in value.items() for leaf in _leaves(v, (*path, k))]


def our_key(path: tuple[Any, ...], where: str) -> str:
    """`("model", "a.weight")` -> `model.a.weight`; `("optimizer", "state", name, slot)` ->
    `optim.name.slot`; what belongs to neither becomes a part of the extra values."""
    for start, word in enumerate(path):
        rest = path[start + 1 :]
        if word in MODEL_ROOTS and rest:
            return MODEL + ".".join(map(str, rest))
        if word in OPTIM_ROOTS and rest[:1] == ("state",) and len(rest) >= 3:
            if isinstance(rest[1], int) or str(rest[1]).isdecimal():
                raise CheckpointError(
                    f"{where}: optimizer state of parameter number {rest[1]}: numbers cannot be "
                    "matched to names; save it by names (get_optimizer_state_dict, or FSDP's "
                    "optim_state_dict), or leave it out"
                )
            return f"{OPTIM}{'.'.join(map(str, rest[1:-1]))}.{rest[-1]}"
        if word in OPTIM_ROOTS and rest[:1] == ("param_groups",):
            return ".".join([GROUPS, *map(str, rest[1:])])
    return ".".join([EXTRA, *map(str, path)])


def collect_objects(flat: dict[str, Any], where: str) -> dict[str, Any]:
    """Values under our keys: groups as a list, all that is unknown under `extra`."""
    found, extra = dict[str, Any](), dict[str, Any]()
    groups: dict[int, dict[str, Said]] = {}
    for key, value in flat.items():
        said = Said(value, f"{where}: {key}")
        if key == GROUPS:
            groups |= {i: dict(group.entries()) for i, group in enumerate(said.parts())}
        elif key.startswith(f"{GROUPS}."):
            number, _, option = key.removeprefix(f"{GROUPS}.").partition(".")
            if not number.isdecimal() or len(number) > 9:
                raise CheckpointError(f"{where}: {key}: parameter groups have numbers")
            groups.setdefault(int(number), {})[option] = said
        elif key.startswith((MODEL, OPTIM)):
            found[key] = value
        else:
            extra[key.removeprefix(f"{EXTRA}.")] = value
    if groups:  # numbers of parameters tell nothing
        found[GROUPS] = [
            {
                "params": [name.text() for name in g["params"].parts()],
                "options": {k: v.value for k, v in g.items() if k != "params"},
            }
            for _, g in sorted(groups.items())
            if "params" in g and not any(isinstance(n.value, int) for n in g["params"].parts())
        ]
    found[EXTRA] = extra
    return found
