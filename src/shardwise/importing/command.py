"""The command line of `import-config`. Exit codes: 0, 2 a mistake (one line on stderr)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.importing.account import one_line
from shardwise.train.options import CommandParser

KINDS = ("deepspeed", "accelerate", "trainer", "fsdp")
_ABOUT = """\
What a configuration of DeepSpeed (JSON), Accelerate (YAML) or the Trainer of transformers (JSON of
its arguments, or its fsdp_config) means here. Every key of it is in the table: translated, the same
by default, not needed, taken from the trainer's arguments (auto), unsupported with the reason, or
unknown. Then comes the configuration for `shardwise train`, with where each line came from.
"""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="shardwise import-config",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("file", metavar="FILE", type=Path, help="a JSON or YAML file")
    add("--ranks", metavar="N", type=_ranks, help="of the job; where the file does not say")
    add("--from", dest="kind", choices=KINDS, help="whose file it is; by default from its keys")
    add("--write", metavar="JOB.toml", type=Path, help="write the configuration there")
    add("--force", action="store_true", help="also over a file that is there")
    add("--json", action="store_true", help="one JSON object on stdout instead of the table")
    return result


def main(arguments: Sequence[str]) -> int:
    """Runs `import-config` and returns its exit code."""
    if "--help" in arguments or "-h" in arguments:
        parser().print_help()
        return 0
    try:
        args = parser().parse_args(arguments)
        _run(args)
    except ConfigError as error:
        print(f"shardwise import-config: {one_line(str(error))}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    from shardwise.importing.formats import import_file
    from shardwise.importing.result import as_json, as_toml, show
    from shardwise.train.columns import console_of

    if args.force and args.write is None:
        raise ConfigError("--force: goes with --write JOB.toml")
    found = import_file(args.file, args.ranks, args.kind)
    if args.write is not None:
        _write(args.write, as_toml(found), args.force)
    if args.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        show(console_of(sys.stdout), found)
        if args.write is not None:
            print(f"written: {args.write}")


def _write(path: Path, text: str, force: bool) -> None:
    """Whole or not at all, and over another file only when asked to."""
    if path.exists() and not force:
        raise ConfigError(f"--write: {path} is there already; --force writes over it")
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"--write: {path}: {error.strerror}") from None


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 2**16:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)
