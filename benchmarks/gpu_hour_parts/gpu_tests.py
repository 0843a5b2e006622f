"""The project's own tests that need a GPU (`pytest -m gpu`), where pytest is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from gpu_hour_parts.device import TESTS
from gpu_hour_parts.settings import Context, Row, Settings

LIMIT_S = 420


def items(settings: Settings) -> list[str]:
    return ["pytest -m gpu"]


def run(item: str, context: Context) -> Row:
    missing = [
        n for n in ("pytest", "hypothesis", "pytest_timeout") if not importlib.util.find_spec(n)
    ]
    if missing:
        return {"state": "skipped", "why": f"pip install {' '.join(missing)}"}
    # Only files that have such tests: others may want packages that are not here.
    files = [
        str(f) for f in sorted(TESTS.glob("*/test_*.py")) if "pytest.mark.gpu" in f.read_text()
    ]
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *files],
        cwd=TESTS.parent, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        env={name: value for name, value in os.environ.items() if name not in ours},
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    row: Row = {"said": lines[-1] if lines else "", "code": done.returncode}
    if done.returncode == 5:  # pytest's word for none
        return row | {"state": "skipped", "why": "no test has the mark gpu"}
    if done.returncode:
        row |= {"state": "wrong", "why": row["said"], "output": done.stdout[-6000:]}
    return row
