"""How much Python a step runs: counted, not timed. A loop over parameters that comes back, or a
walk through units, is seen here before it is felt.

A process group that moves nothing takes the place of peers, so nobody waits and the count is always
the same. What waits and the order check call comes on top.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw

UNITS = 6
# As measured, with a little room. Of the engine's and its transport's own functions.
CALLS_A_UNIT = 252
CALLS_A_PARAMETER = 2


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
    gc.collect()  # a backward looks at the flags of all models that are alive
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


def count() -> None:
    """In a process of its own: a backward looks at all models that are alive, whoever left them."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    print(calls_a_unit(4), calls_a_unit(12))
    dist.destroy_process_group()


def test_calls_of_a_step() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    few, many = map(float, done.stdout.split())
    assert few <= CALLS_A_UNIT, few
    assert round((many - few) / 8, 3) <= CALLS_A_PARAMETER, (few, many)  # of thirds


if __name__ == "__main__":
    count()
