"""`shard.compile`: each unit's forward is one graph without a break, all equal units share it, no
step behind the first compiles anything, and the numbers are those of the eager run.

`aot_eager` runs the kernels of eager, so losses are equal to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import hf_kit
import pytest
import torch
from jobs import run_job
from torch import nn

from ranks import on_ranks


@contextmanager
def counted() -> Iterator[dict[str, Any]]:
    """What dynamo did meanwhile, by the backend that fuses nothing."""
    from torch._dynamo.utils import counters

    found: dict[str, Any] = {}
    compile_ = nn.Module.compile
    torch._dynamo.reset()
    counters.clear()
    try:
        with mock.patch.object(
            nn.Module, "compile", lambda self: compile_(self, backend="aot_eager")
        ):
            yield found
        found["graphs"] = counters["stats"]["unique_graphs"]
        found["breaks"] = dict(counters["graph_break"])
        found["frames"] = counters["frames"]["total"]
    finally:
        torch._dynamo.reset()


def losses(run: Path) -> list[float]:
    rows = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(row)["loss"] for row in rows]
    assert len(found) == 3
    return found


@pytest.mark.parametrize("recomputed", ["none", "full", "selective"])
@on_ranks(2, timeout_s=120)
def test_the_decoder(recomputed: str, rank: int, world: int, tmp_path: Path) -> None:
    keys = {"train__steps": 3, "shard__activation_checkpointing": recomputed}
    run_job(tmp_path / "eager", **keys)
    with counted() as found:
        run_job(tmp_path / "compiled", shard__compile=True, **keys)
    # One graph for training and one for the evaluation behind it; both layers share them.
    assert found == {"graphs": 2, "breaks": {}, "frames": 2}
    assert losses(tmp_path / "compiled") == losses(tmp_path / "eager")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "phi3", "mixtral"])
@on_ranks(2, timeout_s=120)
def test_models_of_transformers(name: str, rank: int, world: int, tmp_path: Path) -> None:
    model = hf_kit.make_directory(name, tmp_path / "model")
    hf_kit.run_hf_job(tmp_path / "eager", model, train__steps=3)
    with counted() as found:
        hf_kit.run_hf_job(tmp_path / "compiled", model, train__steps=3, shard__compile=True)
    assert found == {"graphs": 1, "breaks": {}, "frames": 1}
    assert losses(tmp_path / "compiled") == losses(tmp_path / "eager")
