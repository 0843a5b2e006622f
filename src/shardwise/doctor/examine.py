"""The command line of `doctor`. Exit codes: 0 nothing that matters, 1 a finding that does, 2 a
user's mistake (one line on stderr), 130 interrupted."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.doctor.finding import exit_code, show
from shardwise.errors import ConfigError
from shardwise.units import counted

_HELP = """usage: shardwise doctor RUN [--json]

Looks at a run directory, of a run that is over, was killed or goes on, and says what was wrong with
it: evidence, what it means, and the line of the configuration that changes it. Nothing is written.
Exit codes: 0 nothing that matters, 1 a finding that does, 2 a mistake."""


def main(arguments: Sequence[str]) -> int:
    """Runs `doctor` and returns its exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(_HELP)
        return 0
    try:
        words = [word for word in arguments if word != "--json"]
        for word in words:
            if word.startswith("-"):
                raise ConfigError(f"{word}: unknown option; there is --json")
        if len(words) > 1:
            raise ConfigError(f"{words[1]}: a second run directory; {words[0]} is the first")
        if not words:
            raise ConfigError("name a run directory: shardwise doctor RUN")
        return _of_run(Path(words[0]).expanduser(), as_json="--json" in arguments)
    except ConfigError as error:
        print(f"shardwise doctor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("shardwise doctor: interrupted", file=sys.stderr)
        return 130


def _of_run(path: Path, *, as_json: bool) -> int:
    from shardwise.doctor.run.case import Case
    from shardwise.doctor.run.checks import examine, facts, print_facts
    from shardwise.train.columns import console_of

    case = Case(path)
    found = examine(case)
    if as_json:
        print(json.dumps(facts(case) | {"findings": [each.as_json() for each in found]}))
        return exit_code(found)
    print_facts(case)
    console = console_of(sys.stdout)
    show(console, found)
    console.print(f"\n{counted(len(found), 'finding')}" if found else "Nothing found.")
    return exit_code(found)
