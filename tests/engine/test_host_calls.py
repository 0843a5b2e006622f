"""How much Python a step runs: counted, not timed. A loop over parameters that comes back, or a
walk through units, is seen here before it is felt.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import Any

import torch
import torch.nn as nn

import shardwise as sw
from ranks import on_ranks

UNITS = 6
# As measured, with a little room. Of the engine's and its transport's own functions.
CALLS_A_UNIT = 292  # waiting for a peer makes it vary by 6
CALLS_A_PARAMETER = 4


class Layer(nn.Module):
    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(4, 4) for _ in range(num_params))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for w in self.weights:
            x = x * w
        return x


def calls_a_unit(num_params: int) -> float:
    """Python calls into shardwise in one step, the third one, for each unit."""
    model: Any = nn.Sequential(*(Layer(num_params) for _ in range(UNITS)))
    for layer in model:
        sw.fully_shard(layer, transport="c10d")
    sw.fully_shard(model, transport="c10d")
    gc.collect()  # models of earlier tests: a backward looks at the flags of all that are alive
    x = torch.ones(4, 4, requires_grad=True)
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, _arg: Any) -> None:
        if event == "call" and "/shardwise/" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    for step in range(3):
        sys.setprofile(note if step == 2 else None)
        model(x).sum().backward()
        sys.setprofile(None)
        model.zero_grad()
    assert calls
    return calls.total() / UNITS


@on_ranks(2)
def test_calls_of_a_step(rank: int, world: int) -> None:
    few, many = calls_a_unit(4), calls_a_unit(12)
    assert few <= CALLS_A_UNIT, few
    assert (many - few) / 8 <= CALLS_A_PARAMETER, (few, many)
