"""Floating point operations of a model's forward, counted on meta by torch's own counter: for each
unit, and outside of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise.train.hf.activations import on_meta_ids


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
            on_meta_ids(model, seq_len)
    except Exception:  # noqa: BLE001 - some models look at values, which meta tensors have not
        return None
    finally:
        for handle in handles:
            handle.remove()
    for number, names in enumerate(units):
        if "" in names:
            counts[number] += counter.get_total_flops() - sum(counts)
    return counts
