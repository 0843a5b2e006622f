"""docs/troubleshooting.md names every finding of the doctor, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# Made of other names: a setting's, a variable's, a kind of memory's.
MADE = {
    "no-effect-...", "activations", "logits",
    "nccl-p2p-disable", "nccl-ib-disable", "nccl-shm-disable",
}  # fmt: skip


def names_in_code() -> set[str]:
    found = set()
    for path in (ROOT / "src" / "shardwise" / "doctor").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Finding":
                found |= {
                    node.value
                    for node in ast.walk(call.args[1])
                    if isinstance(node, ast.Constant)
                    and re.fullmatch("[a-z]+(-[a-z0-9]+)*", str(node.value))
                }
    return found - {"saved"}  # the event that one of two names follows from


def test_every_finding_has_its_symptom() -> None:
    column = {
        name
        for row in re.findall(r"^\|[^|]*\|([^|]*)\|", PAGE, re.MULTILINE)
        for name in re.findall("`([^`]+)`", row)
    }
    assert len(names_in_code()) > 25
    assert column == names_in_code() | MADE


def test_settings_that_it_names_exist() -> None:
    from shardwise.train.config import SECTIONS

    for section, key in re.findall(r"`(\w+)\.(\w+)(?: = [^`]*)?`", PAGE):
        if section in SECTIONS and key != "jsonl":  # of a run directory: log.jsonl
            assert key in SECTIONS[section].__dataclass_fields__, f"{section}.{key}"
