"""Models that are parts of one: the stages of a pipeline, each rank with names of its own.

A stage's parameters have the names that they have in the whole model, so a checkpoint of stages is
one of the whole: any other cut into stages reads it, and a model that is not cut. Tensors need
nothing for that, since each rank says what it holds. Brought together are what is no tensor:
parameter groups, ties, values of modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn as nn
from torch import Tensor

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.names import GROUPS, MODEL, OPTIM, tensor_names
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.state import ABOUT, State


def joined(state: State, model: nn.Module, ranks: Ranks) -> State:
    """This rank's state with the values of all stages. A collective."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    own = {k: v for k, v in state.objects.items() if k.startswith(MODEL)}
    told = ranks.on_all(lambda: (state.objects.get(GROUPS, []), state.ties, own, sizes))
    groups = _joined_groups([each[0] for each in told])
    for _, ties, objects, others in told:
        state.ties.update(ties)
        state.objects.update(objects)
        sizes.update(others)
    if groups:
        state.objects[GROUPS] = groups
    state.objects[ABOUT] = {**state.objects.get(ABOUT, {}), "num_params": sum(sizes.values())}
    state.is_stage = True
    return state


def _joined_groups(listed: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Groups of one place and with the same options are one."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for groups in listed:
        for place, group in enumerate(groups):
            key = (place, repr(sorted(group["options"].items(), key=lambda item: item[0])))
            known = found.setdefault(key, {"params": [], "options": group["options"]})
            known["params"] += [n for n in group["params"] if n not in known["params"]]
    return [group for _, group in sorted(found.items(), key=lambda item: item[0][0])]


def names_elsewhere(model: nn.Module, ranks: Ranks) -> set[str]:
    """What other ranks' stages hold, and this rank's does not. A collective."""
    own = set(tensor_names(model).values())
    return set[str]().union(*ranks.on_all(lambda: own)) - own


class StageSource:
    """Another source without what other stages hold."""

    def __init__(self, source: Source, elsewhere: set[str]) -> None:
        self._source = source
        self.path: Path = source.path
        self.tensors: Mapping[str, TensorInfo] = {
            k: v for k, v in source.tensors.items() if not _is_of(k, elsewhere)
        }
        self.ties: Mapping[str, str] = {
            k: v for k, v in source.ties.items() if not _is_of(k, elsewhere)
        }
        self.objects: Mapping[str, Any] = {
            k: v for k, v in source.objects.items() if not _is_of(k, elsewhere)
        }

    def read(self, key: str, box: Box, out: Tensor) -> None:
        self._source.read(key, box, out)

    def close(self) -> None:
        self._source.close()


def _is_of(key: str, names: set[str]) -> bool:
    if key.startswith(MODEL):
        return key.removeprefix(MODEL) in names
    if key.startswith(OPTIM) and key != GROUPS:
        return key.removeprefix(OPTIM).rpartition(".")[0] in names
    return False
