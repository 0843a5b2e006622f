"""Floating point operations of a model's forward, counted on meta by torch's own counter: for each
unit, and outside of all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise.plan.model import PlannedModel
from shardwise.train.config import Config, CustomModelConfig
from shardwise.train.decoder import Decoder


def count_flops(model: Any, units: Sequence[Sequence[str]], seq_len: int) -> list[float] | None:
    """Of one sample of `seq_len` tokens, by unit (names of its modules; "" is the root, which has
    what is outside of all others). None where the model's forward tells nothing on meta.
    """
    counts = [0.0] * len(units)
    at: list[int] = []
    counter = FlopCounterMode(display=False)
    begun: list[int] = []
    handles = []
    for number, names in enumerate(units):
        for name in names:
            if not name:
                continue

            def enter(*_: Any, number: int = number) -> None:
                at.append(number)
                begun.append(counter.get_total_flops())

            def leave(*_: Any) -> None:
                counts[at.pop()] += counter.get_total_flops() - begun.pop()

            module: nn.Module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
    try:
        with torch.no_grad(), counter:
            _logits(model, seq_len)
    except Exception:  # noqa: BLE001 - some models look at values, which meta tensors have not
        return None
    finally:
        for handle in handles:
            handle.remove()
    for number, names in enumerate(units):
        if "" in names:
            counts[number] += counter.get_total_flops() - sum(counts)
    return counts


class Flops:
    """Of one model, by units: plans of the same units share a forward."""

    def __init__(self, model: Any, config: Config) -> None:
        self._model, self._seq_len = model, config.data.seq_len
        self._is_known = not isinstance(config.model, CustomModelConfig)
        self._found: dict[Any, list[float] | None] = {}

    def of(self, plan: PlannedModel) -> list[float] | None:
        units = tuple(unit.modules for unit in plan.units)
        if units not in self._found:
            known = self._is_known
            self._found[units] = count_flops(self._model, units, self._seq_len) if known else None
        return self._found[units]


def _logits(model: Any, seq_len: int) -> None:
    """The forward of one sample."""
    ids = torch.zeros((1, seq_len), dtype=torch.long, device="meta")
    with _buffers_on_meta(model):
        if isinstance(model, Decoder):
            model.logits(ids)
            return
        # With a mask of four dims nobody looks into positions for documents.
        mask = torch.ones((1, 1, seq_len, seq_len), dtype=torch.bool, device="meta")
        model(input_ids=ids, attention_mask=mask, use_cache=False)


@contextlib.contextmanager
def _buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Tables are on the CPU; for one forward on meta they are there too."""
    held = [(m, k, b) for m in model.modules() for k, b in m._buffers.items() if b is not None]
    try:
        for module, key, buffer in held:
            module._buffers[key] = buffer.to("meta")
        yield
    finally:
        for module, key, buffer in held:
            module._buffers[key] = buffer
