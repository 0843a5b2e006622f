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
            place = (
                tensor.data_ptr() if tensor.numel() else id(tensor),
                tensor.shape,
                tensor.dtype,
                tensor.stride(),
            )
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
    value = load_torch(path, str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a state dict, found a {type(value).__name__}")
    found = Found(str(path))
    for keys, leaf in _leaves(value, ()):
        key = our_key(keys, str(path))
        if isinstance(leaf, Tensor) and not key.startswith(GROUPS):
            found.add_tensor(key, keys, leaf)
        else:
            found.add_object(key, keys, leaf)
    return TensorSource(path, found.weights(), found.values())


class Found:
    """Tensors and values under our keys, where they were found. Nested names are joined by dots, so
    two may come to have one key: an error, never the last one."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._tensors: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}

    def add_tensor(self, key: str, path: tuple[Any, ...], value: Any) -> None:
        self._note(key, path)
        self._tensors[key] = value

    def add_object(self, key: str, path: tuple[Any, ...], value: Any) -> None:
        self._note(key, path)
        self._objects[key] = value

    def _note(self, key: str, path: tuple[Any, ...]) -> None:
        if (other := self._paths.setdefault(key, path)) is not path:
            raise CheckpointError(
                f"{self._where}: {short(other)} and {short(path)} would both become {key}; rename "
                "one, or save only one of them"
            )

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
        return collect_objects(self._objects)


def _leaves(value: Any, path: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict) and value and path[-1:] != ("param_groups",):
        return [leaf for k, v in value.items() for leaf in _leaves(v, (*path, k))]
    return [(path, value)]


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


def collect_objects(flat: dict[str, Any]) -> dict[str, Any]:
    """Values under our keys: groups as a list, all that is unknown under `extra`."""
    found: dict[str, Any] = {}
    groups: dict[int, dict[str, Any]] = {}
    extra: dict[str, Any] = {}
    for key, value in flat.items():
        if key == GROUPS and isinstance(value, list):
            groups |= dict(enumerate(value))
        elif key.startswith(f"{GROUPS}."):
            number, _, option = key.removeprefix(f"{GROUPS}.").partition(".")
            if not number.isdecimal():
                raise CheckpointError(f"{key}: parameter groups have numbers")
            groups.setdefault(int(number), {})[option] = value
        elif key.startswith((MODEL, OPTIM)):
            found[key] = value
        else:
            extra[key.removeprefix(f"{EXTRA}.")] = value
    if groups:
        found[GROUPS] = [
            {
                "params": list(g.get("params", ())),
                "options": {k: v for k, v in g.items() if k != "params"},
            }
            for _, g in sorted(groups.items())
            if isinstance(g, dict) and all(isinstance(n, str) for n in g.get("params", [None]))
        ]
    found[EXTRA] = extra
    return found
