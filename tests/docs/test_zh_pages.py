"""docs/zh mirrors the pages of its names: only the words differ."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_code_blocks import DOCS

PAGES = sorted(path.name for path in (DOCS / "zh").glob("*.md"))
_FENCE = re.compile(r"^(?:<!-- [^\n]* -->\n)?```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)


def parts_of(page: Path) -> dict[str, list[str]]:
    """What no translation changes: blocks, names and numbers in code, tables' sizes, headings."""
    text = page.read_text()
    prose = _FENCE.sub("", text)
    rows = [line for line in prose.splitlines() if line.startswith("|")]
    return {
        "blocks": _FENCE.findall(text),
        "code in tables": sorted(re.findall(r"`[^`]+`", "\n".join(rows))),
        "cells": [str(row.count("|")) for row in rows],
        "headings": re.findall(r"^#+(?= )", prose, re.MULTILINE),
        "numbers in tables": sorted(re.findall(r"\d+(?:\.\d+)?", "\n".join(rows))),
    }


@pytest.mark.parametrize("name", PAGES)
def test_a_page_mirrors_the_english_one(name: str) -> None:
    ours, theirs = parts_of(DOCS / "zh" / name), parts_of(DOCS / name)
    for what, found in ours.items():
        assert found == theirs[what], what


@pytest.mark.parametrize("name", PAGES)
def test_links(name: str) -> None:
    page = DOCS / "zh" / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        other = (page.parent / path) if path else page
        assert other.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
            made = {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}
            assert anchor in made, target


def test_core_pages_are_there() -> None:
    assert {"quickstart.md", "choosing.md", "strategies.md", "troubleshooting.md"} <= set(PAGES)
