"""The command line of `report`. Exit codes: 0, 2 a user's mistake (one line on stderr)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.checkpoint.files import replace_file
from shardwise.errors import ConfigError

_HELP = """usage: shardwise report RUN [--out FILE.html]

Writes one HTML file about a run that is over, was killed or goes on: loss and speed, memory by kind
as the plan said and as it was, where a step's time went, what `doctor` finds, events and the
configuration. It loads nothing from elsewhere. FILE is RUN/report.html if left out."""
_FIRST = "<!doctype html>"


def main(arguments: Sequence[str]) -> int:
    """Runs `report` and returns its exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(_HELP)
        return 0
    try:
        run, out = parse(arguments)
        print(write(run, out))
    except ConfigError as error:
        print(f"shardwise report: {error}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str]) -> tuple[Path, Path]:
    """The run, and the file to write."""
    run: Path | None = None
    out: Path | None = None
    words = list(arguments)
    while words:
        name, equals, value = words.pop(0).partition("=")
        if name == "--out":
            if not equals:
                value = words.pop(0) if words and not words[0].startswith("-") else ""
            if not value:
                raise ConfigError("--out: needs a file (--out run.html)")
            out = Path(value)
        elif name.startswith("-"):
            raise ConfigError(f"{name}: unknown option; there is --out FILE.html")
        elif run is not None:
            raise ConfigError(f"{name}: a second run; {run} is the first")
        else:
            run = Path(name + equals + value)
    if run is None:
        raise ConfigError("name the run.dir of a job (shardwise report RUN)")
    return run, out or run / "report.html"


def write(run: Path, out: Path) -> Path:
    """Another file than a report is not replaced."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError('needs matplotlib; pip install "shardwise[figures]"')
    from shardwise.doctor.run.case import Case
    from shardwise.report.page import page

    case = Case(run)
    if out.is_dir():
        raise ConfigError(f"{out}: is a directory; name a file")
    try:
        if out.exists() and not out.read_text("utf-8", errors="replace").startswith(_FIRST):
            raise ConfigError(f"{out}: is there and is no report; name another file")
        replace_file(out, page(case).encode())
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}") from None
    return out
