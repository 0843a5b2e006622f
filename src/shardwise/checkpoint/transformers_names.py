"""Directories that `transformers` wrote under other names than the model's, or in other pieces.

A mixture of experts is stored expert by expert and is one tensor in the model; other models were
renamed since. `transformers` knows the way from the one to the other for each of its models; its
own description is followed here, read as the source is read: one tensor of the model at a time, in
the memory of each rank that holds a part of it. The model may stand inside a wrapper.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.beside import described_model, unsharded_class
from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.names import tensor_names, unwrapped
from shardwise.checkpoint.source import Source, read_whole
from shardwise.checkpoint.state import MODEL


def under_names_of(source: Source, model: nn.Module) -> Source:
    """The source as the model names things; itself where that is how it names them already."""
    source = unwrapped(source, model)
    names = [k.removeprefix(MODEL) for k in source.tensors if k.startswith(MODEL)]
    found = described_model(model)
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if found is None or base is None or {*names} <= {*tensor_names(model).values()}:
        return source
    prefix, inner = found
    kind = unsharded_class(inner)
    if not issubclass(kind, base):
        return source
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        loading = importlib.import_module("transformers.core_model_loading")
        steps = mapping.get_model_conversion_mapping
    except (ImportError, AttributeError):  # before version 5
        return source
    with torch.device("meta"):
        twin = kind(copy.deepcopy(inner.config))
    return _Converted(source, prefix, twin, steps(twin), loading)


class _Converted:
    """Tensors under the model's names; each is one of the source or made from several."""

    def __init__(
        self, source: Source, prefix: str, twin: Any, steps: list[Any], loading: Any
    ) -> None:
        self._source, self._twin, self._root = source, twin, MODEL + prefix
        self._renamed: dict[str, str] = {}  # key -> key of the source
        self._made: dict[str, tuple[str, Any, dict[str, list[str]]]] = {}
        self._last: tuple[str, dict[str, Tensor]] = ("", {})
        self._sort(steps, loading)
        tensors = {k: source.tensors[s] for k, s in self._renamed.items()}
        for name, converter, parts in list(self._made.values()):
            made = self._convert(name, converter, parts, self._empty)
            tensors |= {
                self._root + n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in made.items()
            }
            self._made |= {self._root + n: (name, converter, parts) for n in made}
        self.tensors: Mapping[str, TensorInfo] = tensors

    def _sort(self, steps: list[Any], loading: Any) -> None:
        """Which tensors of the source go where, in the order in which they are joined."""
        own = self._twin.state_dict()
        renamings = [s for s in steps if isinstance(s, loading.WeightRenaming)]
        converters = [s for s in steps if isinstance(s, loading.WeightConverter)]
        by_pattern = {p: c for c in converters for p in c.source_patterns}
        rename = partial(
            loading.rename_source_key,
            base_model_prefix=self._twin.base_model_prefix,
            meta_state_dict=own,
        )
        weights = [k.removeprefix(MODEL) for k in self._source.tensors if k.startswith(MODEL)]
        for old in sorted(weights, key=loading.dot_natural_key):
            new, pattern = rename(old, renamings, converters)
            if new not in own and old in own:
                new, pattern = rename(old, [], [])
            if new in own and pattern is not None:
                made = self._made.setdefault(self._root + new, (new, by_pattern[pattern], {}))
                made[2].setdefault(pattern, []).append(MODEL + old)
            else:
                self._renamed[self._root + (new if new in own else old)] = MODEL + old

    def _empty(self, key: str) -> Tensor:
        info = self._source.tensors[key]
        return torch.empty(info.shape, dtype=info.dtype, device="meta")

    def _convert(
        self, name: str, converter: Any, parts: dict[str, list[str]], get: Any
    ) -> dict[str, Tensor]:
        step = copy.deepcopy(converter)
        for pattern, keys in parts.items():
            for key in keys:
                step.add_tensor(name, key, pattern, partial(get, key))
        found = step.convert(name, model=self._twin, config=self._twin.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in found.items()}

    @property
    def path(self) -> Path:
        return self._source.path

    @property
    def ties(self) -> Mapping[str, str]:
        back = {old: key for key, old in self._renamed.items()}
        return {a: back[k] for a, k in self._source.ties.items() if k in back}

    @property
    def objects(self) -> Mapping[str, Any]:
        return self._source.objects

    def read(self, key: str, box: Box, out: Tensor) -> None:
        if key in self._renamed:
            self._source.read(self._renamed[key], box, out)
        elif box.numel:
            name, converter, parts = self._made[key]
            if self._last[0] != name:
                self._last = ("", {})  # one at a time
                read = partial(read_whole, self._source)
                self._last = (name, self._convert(name, converter, parts, read))
            whole = self._last[1][key.removeprefix(self._root)]
            out.copy_(whole[box.slices_in(Box.whole(whole.shape))])

    def close(self) -> None:
        self._last = ("", {})
        self._source.close()
