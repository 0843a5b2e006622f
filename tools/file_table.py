"""docs/files.md: every file of the package with the first sentence of its docstring.

`python tools/file_table.py` says whether the page is true (`make check`), with `--write` it writes
the page anew (`make format`).
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "shardwise"
PAGE = ROOT / "docs" / "files.md"
HEAD = """# Files

Where a line of code goes: every room of `src/shardwise` and its files, in the words of
their own docstrings. [architecture.md](architecture.md) says how they work together. This page is
written by `python tools/file_table.py --write`.
"""


def sentence_of(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    first = re.match(r".*?[.?](?= |$)", paragraph)
    return (first.group() if first else paragraph).rstrip(".:").replace("|", "\\|")


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    rooms = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    for room in rooms:
        name = room.relative_to(PACKAGE).as_posix()
        head = room / "__init__.py"
        lines += [f"## `{'' if name == '.' else name + '/'}`" if name != "." else "## The package"]
        lines += ["", sentence_of(head) + ".", "", "| file | holds |", "|---|---|"]
        files = sorted(path for path in room.glob("*.py") if path != head)
        lines += [f"| `{path.name}` | {sentence_of(path)} |" for path in files] + [""]
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """1 when the page is not what the docstrings say, or a file has none."""
    silent = [path for path in sorted(PACKAGE.rglob("*.py")) if not sentence_of(path)]
    for path in silent:
        print(
            f"{path.relative_to(ROOT)}: error: no docstring; its first sentence says what it holds"
        )
    text = page()
    if words == ["--write"]:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print("docs/files.md: error: not what the docstrings say; `make format` writes it anew")
        return 1
    return bool(silent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
