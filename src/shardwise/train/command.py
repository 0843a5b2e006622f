"""The command line of `train`: arguments to a checked configuration, then to a launcher or to one
rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.train.config_file import LoadedConfig, load_config
from shardwise.train.options import nearest
from shardwise.train.restarts import EXIT_FINAL, EXIT_REQUEUE, Restarts

# The launcher's options, and the numbers that they take.
_OWN_OPTIONS = {
    "nproc": (1, 2**16),
    "port": (0, 2**16 - 1),
    "max-restarts": (0, 2**16),
    "min-ranks": (1, 2**16),
}
# Whoever is asked to stop, with steps left, ends with EXIT_REQUEUE: see docs/launching.md.
_REQUEUE = "--requeue"


@dataclass(frozen=True, slots=True)
class Arguments:
    """`[CONFIG.toml] [--section.key value ...]` and the launcher's options, split but not yet
    checked."""

    config_file: str | None
    overrides: tuple[tuple[str, str], ...]
    nproc: int | None
    port: int
    restarts: Restarts
    for_ranks: tuple[str, ...]
    """The arguments that every rank gets: all but the launcher's own."""


def parse(arguments: Sequence[str], flags: Sequence[str] = ()) -> Arguments:
    """Splits arguments; both `--key value` and `--key=value` are understood. `flags` were taken out
    before: they count as names that may have been meant."""
    config_file: str | None = None
    overrides: list[tuple[str, str]] = []
    own: dict[str, int] = {}
    for_ranks: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if config_file is not None:
                raise ConfigError(
                    f"{word}: a second configuration file; {config_file} is the first"
                )
            config_file = word
            for_ranks.append(word)
            continue
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise ConfigError(f"{word}: unknown option; options look like --section.key value")
        is_own = key.replace("_", "-") in _OWN_OPTIONS
        if not is_own and "." not in key and (hint := nearest(key, [*_OWN_OPTIONS, *flags])):
            raise ConfigError(f"{word}: unknown option; {hint.replace('mean ', 'mean --')}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{key}: needs a value (--{key} VALUE)")
            value = rest.pop(0)
        if is_own:
            key = key.replace("_", "-")
            own[key] = _number(key, value)
            continue
        overrides.append((key, value))
        for_ranks.append(f"--{key}={value}")
    return Arguments(
        config_file,
        tuple(overrides),
        own.get("nproc"),
        own.get("port", 0),
        Restarts(own.get("max-restarts", 0), own.get("min-ranks")),
        tuple(for_ranks),
    )


def main(arguments: Sequence[str]) -> int:
    """Runs `train` and returns its exit code: the launcher, or one rank where torchrun has set
    RANK."""
    if "--help" in arguments or "-h" in arguments:
        from shardwise.train.help import print_help

        print_help()
        return 0
    requeues = _REQUEUE in arguments
    arguments = [word for word in arguments if word != _REQUEUE]
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _run_as_rank(arguments, requeues)
    try:
        parsed = parse(arguments, [_REQUEUE.removeprefix("--")])
        loaded = load_config(parsed.config_file, parsed.overrides)
        from shardwise.train.launch import launch

        code = launch(loaded, parsed.for_ranks, parsed.nproc, parsed.port, parsed.restarts)
        return EXIT_REQUEUE if requeues and not code and _is_left(loaded) else code
    except ConfigError as error:
        print(f"shardwise train: {error}", file=sys.stderr)
        return 2
    except (ImportError, MemoryError, OSError) as error:
        return _cannot_start(error)


def _cannot_start(error: Exception) -> int:
    """Of the environment, where it is: a limit that even importing torch exceeds."""
    from shardwise.train.limits import explain

    found = explain(error)
    if not found:
        raise error
    print(f"shardwise train: {error or type(error).__name__}: {found}", file=sys.stderr)
    return EXIT_FINAL


def _is_left(loaded: LoadedConfig) -> bool:
    """A job that ended well has steps to take: it was asked to stop."""
    from shardwise.train.run_dir import finished

    return not finished(loaded.config)


def _run_as_rank(arguments: Sequence[str], requeues: bool) -> int:
    from shardwise.train.stop import StopRequest

    stop = StopRequest()
    stop.install()  # before the seconds in which torch is imported
    try:
        parsed = parse(arguments, [_REQUEUE.removeprefix("--")])
        if parsed.nproc is not None or parsed.port or parsed.restarts != Restarts():
            raise ConfigError(
                f"{', '.join(f'--{name}' for name in _OWN_OPTIONS)}: the ranks are started by "
                "torchrun; give it what it has of them"
            )
        loaded = load_config(parsed.config_file, parsed.overrides)
    except ConfigError as error:
        if os.environ["RANK"] == "0":
            print(f"shardwise train: {error}", file=sys.stderr)
        return 2
    try:
        from shardwise.train.worker import exit_now, run_rank
    except (ImportError, MemoryError, OSError) as error:
        return _cannot_start(error)

    code = run_rank(loaded, stop)
    if requeues and not code and _is_left(loaded):
        code = EXIT_REQUEUE
    if code:
        exit_now(code)
    return code


def _number(key: str, text: str) -> int:
    low, high = _OWN_OPTIONS[key]
    if not text.isdecimal() or not low <= int(text) <= high:
        raise ConfigError(f"--{key}: expected a whole number from {low} to {high}, found {text!r}")
    return int(text)
