"""docs/api.md: every public name, whose docstring the site shows. `--write` it, else compare."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import shardwise

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
HEAD = """# Public names

What `import shardwise` gives; everything else may change. The texts are those of the docstrings,
which the site (`make docs`) shows here.
"""


def page() -> str:
    """Classes and functions in the order of the alphabet."""
    kinds = {"Classes": "autoclass", "Functions": "autofunction"}
    found: dict[str, list[str]] = {title: [] for title in kinds}
    for name in sorted(shardwise.__all__, key=str.lower):
        thing = getattr(shardwise, name)
        found["Classes" if inspect.isclass(thing) else "Functions"].append(name)
    parts = [HEAD]
    for title, names in found.items():
        parts.append(f"## {title}\n")
        parts += [f"```{{eval-rst}}\n.. {kinds[title]}:: shardwise.{n}\n```\n" for n in names]
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    wanted = page()
    if "--write" in arguments:
        PAGE.write_text(wanted)
        return 0
    if not PAGE.exists() or PAGE.read_text() != wanted:
        print(f"{PAGE}: is not what shardwise.__all__ says; run: python tools/api_page.py --write")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
