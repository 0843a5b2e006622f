"""The command line of `verify`. Exit codes: 0 nothing differs, 1 something does, 2 a user's mistake
(one line on stderr), 130 interrupted."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from shardwise.comm.choose import BY_CHOICE, names
from shardwise.doctor.plan import STRATEGIES, Plan, Row
from shardwise.errors import ConfigError
from shardwise.train.config_file import load_config
from shardwise.train.options import CommandParser
from shardwise.units import full_name

_Name = TypeVar("_Name", bound=str)
_ABOUT = """\
Is the model of a configuration trained alike on one rank, on several, and after a resume? Compares
the trainer with plain PyTorch on a small version of the job, on this machine's CPU.

  shardwise verify                                the built-in decoder
  shardwise verify job.toml --ranks 1,2,3
  shardwise verify job.toml --strategies full_shard --transports c10d --json
"""


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="shardwise verify",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("config", nargs="?", metavar="CONFIG.toml", help="a configuration of shardwise train")
    add("--ranks", default="1,2,4", metavar="N,N", help="numbers of ranks (1,2,4)")
    add("--strategies", default=",".join(STRATEGIES), metavar="S,S", help="(all)")
    add(
        "--transports", default=",".join(BY_CHOICE), metavar="T,T", help=f"({', '.join(BY_CHOICE)})"
    )
    add("--steps", default="4", metavar="N", help="compared steps of each run, at least 2 (4)")
    add("--timed-steps", default="3", metavar="N", help="timed steps of each run (3)")
    add("--json", action="store_true", help="one JSON object on stdout instead of the table")
    return result


def main(arguments: Sequence[str]) -> int:
    """Runs `verify` and returns its exit code."""
    if "--help" in arguments or "-h" in arguments:
        parser().print_help()
        return 0
    try:
        args = parser().parse_args(arguments)
        with tempfile.TemporaryDirectory(prefix="shardwise-verify-") as folder:
            return _run(args, plan_of(args, Path(folder)))
    except ConfigError as error:
        print(f"shardwise verify: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("shardwise verify: interrupted; its ranks have ended", file=sys.stderr)
        return 130


def plan_of(args: argparse.Namespace, folder: Path) -> Plan:
    """What arguments mean; `folder` takes the runs."""
    ranks = [_count("--ranks", text, 1) for text in args.ranks.split(",")]
    return Plan(
        loaded=load_config(args.config),
        ranks=tuple(sorted({1, *ranks})),
        strategies=_chosen("--strategies", args.strategies, STRATEGIES),
        transports=_chosen("--transports", args.transports, names()),
        num_steps=_count("--steps", args.steps, 2),
        folder=folder,
    )


def _run(args: argparse.Namespace, plan: Plan) -> int:
    from shardwise.doctor.ladder import climb
    from shardwise.doctor.table import LEGEND, as_json, show
    from shardwise.train.columns import console_of

    signal.signal(signal.SIGTERM, _interrupt)
    progress, out = console_of(sys.stderr), console_of(sys.stdout)
    num_timed = _count("--timed-steps", args.timed_steps, 1)

    def tell(text: str) -> None:
        if sys.stderr.isatty():
            progress.print(text, markup=False, highlight=False, style="dim")

    rows: list[Row] = []
    interrupted = False
    try:
        for row in climb(plan, num_timed, tell):
            rows.append(row)  # noqa: PERF402 - one by one: an interruption keeps them
    except KeyboardInterrupt:  # what is known by now was paid for
        interrupted = True
    result = as_json(rows)
    if interrupted:
        result["passed"] = False
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(out, rows, _title(plan))
        out.print(LEGEND, style="dim")
        failed = sum(row.result == "FAIL" for row in rows)
        verdict = "interrupted" if interrupted else "PASS"
        out.print(f"verify: FAIL ({failed} of {len(rows)})" if failed else f"verify: {verdict}")
    if interrupted:
        raise KeyboardInterrupt
    return 0 if result["passed"] else 1


def _title(plan: Plan) -> str:
    model: Any = plan.loaded.config.model
    path = plan.loaded.path or "built-in decoder"
    said = f"{path}: model {model.kind}, {plan.num_steps} steps of {plan.num_micro_batches} parts"
    has_tensor = plan.loaded.config.mesh.tensor > 1
    return (
        f"{said}, without its tensor axis (mesh.tensor), whose sums have another order"
        if has_tensor
        else said
    )


def _chosen(option: str, text: str, allowed: Sequence[_Name]) -> tuple[_Name, ...]:
    known = {str(name): name for name in allowed}
    for word in text.split(","):
        if full_name(word) not in known:
            raise ConfigError(f"{option}: there are {', '.join(known)}, found {word!r}")
    return tuple(dict.fromkeys(known[full_name(word)] for word in text.split(",")))


def _count(option: str, text: str, least: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= 1024:
        raise ConfigError(f"{option}: expected whole numbers from {least}, found {text!r}")
    return int(text)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
