"""benchmarks/offload.py: what is kept behind a simulated bus, and what its model predicts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "offload.py"


def module() -> Any:
    spec = importlib.util.spec_from_file_location("offload_benchmark", BENCHMARK)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def test_it_runs_to_its_end(tmp_path: Path) -> None:
    """And weights are the same in both ways that clip, or it ends with an error."""
    found = tmp_path / "offload.json"
    command = [sys.executable, str(BENCHMARK), "--model", "tiny", "--tokens", "8,32"]
    command += ["--rounds", "1", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(found.read_text())["rows"]
    assert len(rows) == 2 * 3 * 3
    assert all(row["step_s"] > 0 and 0 < row["predicted"] < 1 for row in rows)


def test_prediction() -> None:
    """By hand: four equal units, a forward of 4 s, a backward of 8 s, a unit steps in 3 s."""
    benchmark = module()
    numels = (100, 100, 100, 100)
    pieces = benchmark.Pieces(4.0, 8.0, 0.0, 0.03, numels)
    fast = 1e12
    assert benchmark.predicted("naive", pieces, fast) == pytest.approx(12 + 12)
    # Units are ready at 2, 4, 6, 8 and done at 5, 8, 11, 14 behind the begin of the backward: the
    # forward waits for the last of them, its first unit, from 8 to 14.
    assert benchmark.predicted("backward", pieces, fast) == pytest.approx(12 + 6)
    # Done at 3, 6, 9, 12; the forward ends 1 s behind the last one.
    assert benchmark.predicted("forward", pieces, fast) == pytest.approx(12 + 13 - 4)
    clipped = benchmark.Pieces(4.0, 8.0, 1.0, 0.03, numels)  # behind the backward, before a step
    assert benchmark.predicted("backward", clipped, fast) == pytest.approx(12 + 6)
    assert benchmark.predicted("forward", clipped, fast) == pytest.approx(13 + 13 - 4)
    # Beside 2 s of AdamW the device does 1 s of work, and the other one alone.
    beside = benchmark.Pieces(4.0, 8.0, 0.0, 0.02, numels, 2.0, 1.0)
    clock = benchmark.Clock(beside, fast)
    clock.hand_over(0)
    clock.compute(2.0)
    assert clock.now == pytest.approx(3.0)
    clock.finish_unit(0)
    assert clock.now == pytest.approx(3.0)
    slow_bus = 12 * 100 / 1e9  # GB/s at which a unit's bytes take a second more
    assert benchmark.predicted("naive", pieces, slow_bus) == pytest.approx(12 + 16)


def test_crossing() -> None:
    reaches = module().reaches
    assert reaches([(16, 0.5), (64, 0.9), (256, 1.0)], 0.95) == pytest.approx(128)
    assert reaches([(16, 0.5), (64, 0.9)], 0.95) is None
