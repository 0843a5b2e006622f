"""benchmarks/trl_losses.py with a tiny model: TRL's losses are ours where both train the same, and
elsewhere what is predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="the extra 'integrations' is not installed")

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "trl_losses.py"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_losses_beside_trl_on_two_ranks() -> None:
    command = [sys.executable, str(BENCHMARK), "--ranks", "2", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["holds"] and all(found["holds"] for found in result["checks"])
    runs = result["runs"]["2"]
    trained = {"shardwise", "matched", "rank_means", "whole_fp32", "defaults"}
    assert set(runs) == {*trained, "evaluated"}
    ours, tolerance = runs["shardwise"]["loss"][0], 1e-5
    for case in ("rank_means", "whole_fp32", "defaults"):  # they do differ
        assert abs(runs[case]["loss"][0] / ours - 1) > 10 * tolerance
