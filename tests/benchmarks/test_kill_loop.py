"""The checks of benchmarks/kill_loop.py see what they look for; a run of 50 kills takes too long
here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw

PATH = Path(__file__).parents[2] / "benchmarks" / "kill_loop.py"


@pytest.fixture(scope="module")
def kill_loop() -> Any:
    spec = importlib.util.spec_from_file_location("kill_loop", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_loop"] = module
    spec.loader.exec_module(module)
    return module


def write_run(run: Path, step: int, seed: int = 0, momentum: float = 0.0) -> Path:
    """A run directory with rows up to `step` and a checkpoint of it."""
    run.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["momentum_buffer"] += momentum
    torch.manual_seed(0)
    rows = [{"step": s, "loss": 1.0 / s, "grad_norm": 0.5} for s in range(1, step + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sw.CheckpointManager(run / "checkpoints").save(step, model, optimizer)


def test_damage_and_loss_are_seen(kill_loop: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = write_run(run, 3)
    assert kill_loop.check_left(run, 3) == (3, 0)
    with pytest.raises(kill_loop.PromiseError, match="step 6 was saved, now 3 is the newest"):
        kill_loop.check_left(run, 6)
    file = path / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(kill_loop.PromiseError, match=r"damaged: .*rank_00000\.safetensors"):
        kill_loop.check_left(run, 3)
    file.unlink()  # no longer complete
    with pytest.raises(kill_loop.PromiseError, match="missing"):
        kill_loop.check_left(run, 0)


def test_ends_that_differ_are_seen(kill_loop: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "whole", 4)
    write_run(tmp_path / "run", 4)
    found = kill_loop.compare_ends(tmp_path, 4)
    assert found["equal_rows_of_loss_and_norm"] == 4
    assert found["equal_tensors_model"] == 2 and found["equal_tensors_optim"] >= 2
    for change, text in (
        ({"seed": 1}, "model differs at the end: .*weight"),
        ({"momentum": 1e-6}, "optim differs at the end: .*momentum_buffer"),
        ({"step": 3}, "other losses or norms"),
    ):
        write_run(tmp_path / "run", **{"step": 4, **change})
        with pytest.raises(kill_loop.PromiseError, match=text):
            kill_loop.compare_ends(tmp_path, 4)


def test_too_few_moments_are_seen(kill_loop: Any) -> None:
    def kill(moment: str, whom: str) -> Any:
        return kill_loop.Kill("any", moment, whom, False, 0, 0, 0.0, 0, False)

    kills = [kill(m, w) for m in ("save", "load", "step") for w in ("all", "rank 1")]
    assert kill_loop.check_coverage(kills)["moments"] == {"save": 2, "load": 2, "step": 2}
    with pytest.raises(kill_loop.PromiseError, match="load was hit 0 times, at least 1 of 4"):
        kill_loop.check_coverage([k for k in kills if k.moment != "load"])
    with pytest.raises(kill_loop.PromiseError, match="one rank was hit 0 times"):
        kill_loop.check_coverage([k for k in kills if k.whom == "all"])
