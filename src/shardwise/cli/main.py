"""Finds the sub-command and runs it. Exit codes: 0 done, 2 a user's mistake (one line on stderr), 1
the rest.

A command is a module and its `main(arguments) -> exit code`; adding one is a line in `_COMMANDS`.
Nothing is imported before it is needed, so `--help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from shardwise.train.options import unknown_command

# name -> (module with `main`, what it does)
_COMMANDS = {
    "train": (
        "shardwise.train.command",
        "train a model, sharded over ranks; start again to continue",
    ),
    "data": (
        "shardwise.train.text.command",
        "show what a model will see: samples, lengths, padding, trained tokens",
    ),
    "bench": (
        "shardwise.bench.command",
        "compare engines on one model: time, memory, communication",
    ),
    "plan": (
        "shardwise.cli.plan",
        "which strategy fits which devices: memory and communication, before it runs",
    ),
    "explain": (
        "shardwise.cli.explain",
        "show the units of a job and what they cost, without running it",
    ),
    "verify": (
        "shardwise.doctor.command",
        "is a model trained alike on one rank, on several, and after a resume?",
    ),
    "doctor": (
        "shardwise.doctor.examine",
        "what is in the way on this machine, or was wrong with a run; and what to write",
    ),
    "report": (
        "shardwise.report.command",
        "a run as one HTML file: loss, memory, time, findings, promises beside what happened",
    ),
    "replicas": (
        "shardwise.cli.replicas",
        "where replicas that train apart meet every so many steps (DiLoCo)",
    ),
    "import-config": (
        "shardwise.importing.command",
        "what a file of DeepSpeed, Accelerate or the Trainer means here, key by key",
    ),
    "generate": ("shardwise.train.hf.generate", "what a model says to a prompt"),
    "checkpoint": (
        "shardwise.cli.checkpoint",
        "list, verify, compare, import, export and convert checkpoints",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("--help", "-h", "help"):
        print(_help())
        return 0
    if words[0] == "--version":
        import shardwise

        print(f"shardwise {shardwise.__version__}")
        return 0
    name = words[0]
    if name not in _COMMANDS:
        print(f"shardwise: {unknown_command(name, _COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(_COMMANDS[name][0])
    try:
        return module.main(words[1:])
    except BrokenPipeError:  # `shardwise train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _help() -> str:
    width = max(len(name) for name in _COMMANDS)
    commands = "\n".join(f"  {name:{width}}  {text}" for name, (_, text) in _COMMANDS.items())
    return (
        "usage: shardwise COMMAND [ARGUMENTS]\n\n"
        f"commands:\n{commands}\n\n"
        "shardwise COMMAND --help explains one; shardwise --version prints the version"
    )
