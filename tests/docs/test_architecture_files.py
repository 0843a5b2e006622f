"""docs/architecture.md has a line for every file of the package, and for no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardwise"


def test_every_file_has_a_line() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## Where a line of code goes")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", section)) - {"tests/ranks.py"}
    here = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py")}
    assert named == here, f"missing: {sorted(here - named)}; gone: {sorted(named - here)}"
