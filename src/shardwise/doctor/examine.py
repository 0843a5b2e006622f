"""The command line of `doctor`. Exit codes: 0 nothing that matters, 1 a finding that does, 2 a
user's mistake (one line on stderr), 130 interrupted."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from shardwise.doctor.finding import Finding, exit_code, show
from shardwise.doctor.machine.show import print_machine
from shardwise.errors import ConfigError
from shardwise.units import counted

_HELP = """usage: shardwise doctor [--save FILE [--ranks N]] [--dir FOLDER] [--json]
       shardwise doctor RUN [--json]

Without a run: looks at this machine: versions, devices, memory, limits, /dev/shm, disk. With --save
FILE it measures how fast memory and disk move bytes, and what --ranks N (2) ranks compute and move
side by side (about a minute), and writes a hardware file, which `shardwise plan --hardware FILE`
reads. --dir is where runs will write (.).
With a run directory, of a run that is over, was killed or goes on: what was wrong with it. Nothing
is written there.
Each finding has its evidence, what it means, and a line that changes it. Exit codes: 0 nothing that
matters, 1 a finding that does, 2 a mistake."""
MOST_RANKS = 64  # that one host measures
_VALUED = ("--save", "--dir", "--ranks")


def main(arguments: Sequence[str]) -> int:
    """Runs `doctor` and returns its exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(_HELP)
        return 0
    try:
        run, own, as_json = parse_arguments(arguments)
        if run is None:
            return _of_machine(own, as_json=as_json)
        for option in own:
            raise ConfigError(f"{option}: is for the machine; leave out {run}")
        return _of_run(run, as_json=as_json)
    except ConfigError as error:
        print(f"shardwise doctor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("shardwise doctor: interrupted", file=sys.stderr)
        return 130


def parse_arguments(arguments: Sequence[str]) -> tuple[Path | None, dict[str, str], bool]:
    """The run, options with values, and whether --json is there."""
    run: Path | None = None
    own: dict[str, str] = {}
    words, as_json = list(arguments), False
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word == "--json":
            as_json = True
        elif name in _VALUED:
            if not equals and (not words or words[0].startswith("-")):
                raise ConfigError(f"{name}: needs a value ({name} {name[2:].upper()})")
            own[name] = value if equals else words.pop(0)
        elif word.startswith("-"):
            raise ConfigError(f"{word}: unknown option; there are --json, {', '.join(_VALUED)}")
        elif run is not None:
            raise ConfigError(f"{word}: a second run directory; {run} is the first")
        else:
            run = Path(word).expanduser()
    return run, own, as_json


def _of_machine(own: dict[str, str], *, as_json: bool) -> int:
    import torch

    from shardwise.doctor.machine.bandwidth import measure
    from shardwise.doctor.machine.checks import examine
    from shardwise.doctor.machine.gpus import find_gpus, pairs_without_p2p
    from shardwise.doctor.machine.hardware_file import as_toml, check_target, write
    from shardwise.doctor.machine.host import look
    from shardwise.train.columns import console_of

    folder, target = Path(own.get("--dir", ".")).expanduser(), own.get("--save")
    ranks = _ranks(own)
    if target is not None:
        check_target(Path(target).expanduser())
    host, gpus = look(folder), find_gpus()
    no_p2p = pairs_without_p2p(torch.cuda)
    found = examine(host, gpus, no_p2p, folder, torch_sees=torch.cuda.device_count())
    measured = measure(folder, ranks) if target is not None else None
    if target is not None and measured is not None:
        write(Path(target).expanduser(), as_toml(host, gpus, measured))
    if as_json:
        print(json.dumps({
            "host": asdict(host),
            "gpus": [asdict(gpu) for gpu in gpus],
            "pairs_without_p2p": no_p2p,
            "measured": measured and measured.as_json(),
            "findings": [each.as_json() for each in found],
        }))  # fmt: skip
        return exit_code(found)
    console = console_of(sys.stdout)
    print_machine(console, host, gpus, measured)
    if target is not None:
        console.print(f"Written: {target} (shardwise plan --hardware {target})", markup=False)
    return _end(console, found)


def _ranks(own: dict[str, str]) -> int:
    text = own.get("--ranks", "2")
    if "--ranks" in own and "--save" not in own:
        raise ConfigError("--ranks: goes with --save FILE: nothing is measured without it")
    if not text.isdecimal() or not 2 <= int(text) <= MOST_RANKS:
        raise ConfigError(f"--ranks: expected a number from 2 to {MOST_RANKS}, found {text!r}")
    return int(text)


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
    return _end(console_of(sys.stdout), found)


def _end(console: Console, found: list[Finding]) -> int:
    show(console, found)
    console.print(f"\n{counted(len(found), 'finding')}" if found else "Nothing found.")
    return exit_code(found)
