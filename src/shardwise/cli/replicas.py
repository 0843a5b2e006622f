"""`shardwise replicas`: the coordinator as a command.

Exit codes: 0 all replicas have left, 2 a mistake (one line on stderr), 1 anything else, 130
interrupted. Started again with the same --dir it goes on at its round.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.options import CommandParser, count_to, number

_ABOUT = """\
The process through which replicas of a job meet: each is a `shardwise train` of its own with
replicas.coordinator = "HOST:PORT", trains --steps steps alone, and then all take a common step.

  shardwise replicas --dir runs/outer --replicas 2 --steps 20
"""


def main(arguments: Sequence[str]) -> int:
    if "--help" in arguments or "-h" in arguments:
        parser().print_help()
        return 0
    try:
        args = parser().parse_args(arguments)
        return _serve(args)
    except (ConfigError, CheckpointError) as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        _say("interrupted; start it again with the same --dir to go on")
        return 130


def parser() -> argparse.ArgumentParser:
    result = CommandParser(
        prog="shardwise replicas",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("--dir", required=True, metavar="DIR", help="where its state is kept")
    add(
        "--steps",
        type=count_to(2**31),
        default=20,
        metavar="H",
        help="that replicas train alone (20)",
    )
    add("--replicas", type=count_to(2**31), default=2, metavar="N", help="with which it begins (2)")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=29600, help="0: any that is free (29600)")
    add("--lr", type=number, default=0.7, help="of the outer step (0.7)")
    add("--momentum", type=number, default=0.9, help="Nesterov's, of the outer step (0.9)")
    add("--patience", type=number, default=300.0, metavar="S", help="with late replicas (300)")
    return result


def _serve(args: argparse.Namespace) -> int:
    if args.momentum >= 1:
        raise ConfigError(f"--momentum: {args.momentum:g} is not below 1")
    folder = Path(args.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--dir {folder}: cannot be a directory: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--dir {folder}: cannot be written to")
    try:
        listener = socket.create_server((args.host, args.port), backlog=1024)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port: cannot listen on {args.host}:{args.port} ({error})") from None
    from shardwise.replicas.coordinator import Coordinator, Meeting
    from shardwise.replicas.member import TOKEN_VARIABLE
    from shardwise.replicas.outer import OuterSettings

    meeting = Meeting(
        args.steps,
        args.replicas,
        OuterSettings(args.lr, args.momentum),
        args.patience,
        os.environ.get(TOKEN_VARIABLE, ""),
    )
    host, port = listener.getsockname()[:2]
    _say(f"waits for {args.replicas} replicas at {host}:{port}")
    with listener:
        Coordinator(meeting, folder, _say).serve(listener)
    _say("all replicas have left")
    return 0


def _say(text: str) -> None:
    print(f"shardwise replicas: {text}", file=sys.stderr, flush=True)
