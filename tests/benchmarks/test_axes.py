"""benchmarks/three_axes.py and muon.py: small members of what they show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def result_of(name: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_three_axes() -> None:
    """8 ranks as 2 x 2 x 2 are one process, and so are 2 ranks from their checkpoint, and back."""
    found = result_of("three_axes", "--steps", "4")
    assert [row["ranks"] for row in found["rows"]] == [8, 2, 8]
    assert all(row["difference"] <= 1e-5 for row in found["rows"])


def test_muon() -> None:
    """Owners step each matrix once, to the bits of one process; everyone steps all of them."""
    found = result_of("muon", "--model", "tiny", "--rounds", "1")
    rows = {row["way"]: row for row in found["rows"]}
    for way, times in (("owned", 1), ("whole", 1), ("everyone", 2)):
        assert rows[way]["iterations"] == times * found["matrices"], way
        assert rows[way]["difference"] == 0, way
    assert rows["whole"]["sent_bytes"] == 0 < rows["owned"]["sent_bytes"]
