"""The project's own tests that need a GPU (`pytest -m gpu`), where pytest is installed."""

from __future__ import annotations

import importlib.util
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
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", str(TESTS)],
        cwd=TESTS.parent, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    row: Row = {"said": lines[-1] if lines else "", "code": done.returncode}
    if done.returncode == 5:  # pytest's word for none
        return row | {"state": "skipped", "why": "no test has the mark gpu"}
    if done.returncode:
        row |= {"state": "wrong", "why": row["said"], "output": done.stdout[-6000:]}
    return row
