"""What `shardwise doctor` finds: evidence, what it means, and what to write to change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

WRONG, COSTS, HINT = 3, 2, 1
_WORDS = {WRONG: "wrong", COSTS: "costs", HINT: "hint"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. `weight`: WRONG (the results, or no results), COSTS (time or memory), or HINT.

    name: short and stable, for programs.
    evidence: the figures, and the file that they stand in.
    remedy: lines for a configuration or a shell.
    """

    weight: int
    name: str
    title: str
    evidence: str
    meaning: str
    remedy: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"weight": _WORDS[self.weight]}


def sorted_findings(found: Sequence[Finding]) -> list[Finding]:
    """The heaviest first; else as they were found."""
    return sorted(found, key=lambda finding: -finding.weight)


def exit_code(found: Sequence[Finding]) -> int:
    """1 where something matters; hints do not."""
    return int(any(finding.weight > HINT for finding in found))


def show(console: Console, found: Sequence[Finding]) -> None:
    for number, finding in enumerate(found, 1):
        console.print(f"\n{number}. {finding.title} ({_WORDS[finding.weight]})", markup=False)
        for name in ("evidence", "meaning", "remedy"):
            label = f"{name}:"
            for line in getattr(finding, name).splitlines():
                console.print(f"   {label:<10}{line}", markup=False, soft_wrap=True)
                label = ""
