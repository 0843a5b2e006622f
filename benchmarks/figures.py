"""Draws committed results again: python benchmarks/figures.py results/DATE_CASE.json ...

Where DATE_memory_CASE.json lies beside it, the memory of that run is drawn too (memory is measured
in a run of its own, `--only memory`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardwise.bench.figure import draw


def main(names: list[str]) -> None:
    for path in map(Path, names):
        date, _, case = path.stem.partition("_")
        comparisons = json.loads(path.read_text())["comparisons"]
        memory = path.with_name(f"{date}_memory_{case}.json")
        if memory.exists():
            sizes = json.loads(memory.read_text())["comparisons"]
            for comparison, other in zip(comparisons, sizes, strict=True):
                for name, row in comparison["engines"].items():
                    found = other["engines"].get(name, {})
                    row["peak_memory_bytes"] = found.get("peak_memory_bytes")
        draw(comparisons, path.with_suffix(".png"))


if __name__ == "__main__":
    main(sys.argv[1:])
