"""benchmarks/launches.py: on an accelerator no more launches and no more bytes than FSDP2's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "launches.py"


@pytest.mark.long
@pytest.mark.timeout(120)
def test_no_more_device_work_than_fsdp2_where_rows_are_cut(tmp_path: Path) -> None:
    found = tmp_path / "launches.json"
    command = [sys.executable, str(BENCHMARK), "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(found.read_text())["rows"]
    by_rows = [row for row in rows if row["by_rows"]]
    assert len(by_rows) == 36
    for row in by_rows:
        casts = "bf16" in row["case"]
        in_place = "huge" in row["case"]
        for phase, num in (("forward", 1), ("backward", 3)):
            ours, peer = row["shardwise"][phase], row["fsdp2"][phase]
            at = f"{row['case']}, {phase}: {ours['kinds']}, FSDP2 {peer['kinds']}"
            assert ours["launches"] <= num + casts - in_place, at  # launches do not creep back
            assert ours["launches"] <= peer["launches"], at
            assert ours["copied_bytes"] <= peer["copied_bytes"], at
            assert ours["collectives"] == peer["collectives"], at
