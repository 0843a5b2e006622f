"""From a directory of safetensors straight into the shards of a model, or new weights without one.

Each rank reads the rows that it holds, in pieces; nobody has the whole model, nor one whole tensor
more than its shards. `transformers`' own description of names is followed (directories of older
versions, experts stored one by one), and so are the names that its models say may be left over.
What does not fit is found on meta, before anything is sharded or written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import materialize
from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.importing import open_source
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.loading import Differences, differences, load_model
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.state import MODEL
from shardwise.checkpoint.transformers_names import under_names_of
from shardwise.engine.core.state import units_in
from shardwise.engine.services.materialize import give_memory, initialise, waiting_modules
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.hf.description import Description


class Weights:
    """The weights of a directory under the names of a model."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._keys = {key: key for key in source.tensors}  # here: in the source
        self.path: Path = source.path
        self.tensors: dict[str, TensorInfo] = dict(source.tensors)
        self.ties: Mapping[str, str] = source.ties
        self.objects: Mapping[str, Any] = {}

    def leave_out(self, surplus: list[str], patterns: Collection[str]) -> None:
        """Forgets those names that nobody misses, by regular expressions of transformers."""
        for name in surplus:
            if any(re.search(pattern, name) for pattern in patterns):
                self.tensors.pop(MODEL + name, None)

    def rename(self, names: Mapping[str, str]) -> None:
        """As the model has come to call them: adapters put themselves around modules."""
        new = {MODEL + old: MODEL + name for old, name in names.items()}
        self._keys = {new.get(key, key): old for key, old in self._keys.items()}
        self.tensors = {new.get(key, key): info for key, info in self.tensors.items()}
        self.ties = {new.get(a, a): new.get(key, key) for a, key in self.ties.items()}

    def read(self, key: str, box: Box, out: Tensor) -> None:
        self._source.read(self._keys[key], box, out)

    def close(self) -> None:
        self._source.close()


def dtypes_of(source: Source) -> list[torch.dtype]:
    """Of its floating-point tensors, the most frequent by elements first."""
    counts: Counter[torch.dtype] = Counter()
    for info in source.tensors.values():
        if info.dtype.is_floating_point:
            counts[info.dtype] += info.size_bytes // info.dtype.itemsize
    return [dtype for dtype, _ in counts.most_common()]


def open_directory(described: Description) -> Source:
    """What stands in the directory's files, under their names."""
    try:
        return open_source(described.path)
    except CheckpointError as error:
        raise ConfigError(f"model.path: {error}") from None


def under_names_of_model(source: Source, described: Description, model: Any) -> Weights:
    """The same under the names of `model`, on meta; ConfigError where it does not fit it."""
    try:
        weights = Weights(under_names_of(source, model))
        _check_kinds(weights, described, model)  # before names: of scales nothing else knows
        surplus = differences(weights, model).unexpected
        weights.leave_out(surplus, model._keys_to_ignore_on_load_unexpected or ())
        found = differences(weights, model)
    except CheckpointError as error:
        raise ConfigError(f"model.path: {error}") from None
    if not found:
        return weights
    weights.close()
    raise ConfigError(
        f"model.path: {described.path}: does not fit {type(model).__name__}: {_in_words(found)}"
    )


def _check_kinds(weights: Weights, described: Description, model: nn.Module) -> None:
    """Whole numbers, or floating ones of 8 bits and fewer, in place of weights are quantized ones:
    they mean nothing without scales, which no model of transformers reads by itself."""
    for name, parameter in model.named_parameters():
        info = weights.tensors.get(MODEL + name)
        if info and parameter.dtype.is_floating_point and _is_quantized(info.dtype):
            weights.close()
            kind = str(info.dtype).removeprefix("torch.")
            raise ConfigError(
                f"model.path: {described.path}: {name} is stored as {kind}, quantized: without its "
                "scales it is no weight; write it as bfloat16 first"
            )


def _is_quantized(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point or dtype.itemsize < 2  # float8 and float4


def fill(model: nn.Module, weights: Weights, device: torch.device) -> None:
    """Gives a sharded model memory and its weights. What the directory does not have (adapters) is
    left as it is."""
    give_memory(model, device, ())
    move_buffers(model, device)
    try:
        load_model(weights, model, strict=False, cast=True)
    except CheckpointError as error:
        raise ConfigError(f"model.path: {_in_words(error)}") from None


def fill_anew(model: nn.Module, device: torch.device, seed: int) -> None:
    """New weights by transformers' `_init_weights`, the same on any number of ranks."""
    if units_in(model):
        materialize(model, device=device, seed=seed)
    else:  # a plain model, which runs are compared with
        waiting = waiting_modules(model)
        give_memory(model, device, waiting)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            initialise(model, waiting)
    move_buffers(model, device)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Tables were computed on the CPU."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[key] = buffer.to(device)


def _in_words(found: Differences | CheckpointError) -> str:
    return str(found).replace("the checkpoint", "the directory")
