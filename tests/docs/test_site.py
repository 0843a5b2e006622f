"""The guide as a site (`make docs`): every page has a place, every public name is listed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_page_has_a_place() -> None:
    """In one group of the index."""
    places = re.findall(r"^([a-z0-9]+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert len(places) == len(set(places))
    assert set(places) == {page.stem for page in DOCS.glob("*.md")} - {"index"}


def test_every_public_name_is_listed() -> None:
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "tools" / "api_page.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "api.md").read_text() == module.page(), "run: python tools/api_page.py --write"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_it_builds(tmp_path: Path) -> None:
    """Warnings are errors: docstrings are well formed, links inside of the site lead somewhere."""
    pytest.importorskip("sphinx", reason="the extra 'docs' is not installed")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "-q", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fully_shard" in (tmp_path / "api.html").read_text()
