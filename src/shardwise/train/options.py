"""Commands that argparse reads: a mistake is one line, like all others."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from shardwise.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """Mistakes become a `ConfigError`, one line, with the nearest option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Of the parser of a sub-command too, which knows its own options best."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0]
            if not word.startswith("-"):
                raise ConfigError(f"{word}: one argument too many; {self.prog} --help says more")
            known = [option for action in self._actions for option in action.option_strings]
            hint = nearest(word.partition("=")[0], known)
            hint = hint or f"{self.prog} --help lists options"
            raise ConfigError(f"{word}: unknown option; {hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def count_to(most: int) -> Callable[[str], int]:
    """The type of an option: a whole number from 1."""

    def count(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
        return int(text)

    return count


def number(text: str) -> float:
    """The type of an option: a number from 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number from 0, found {text!r}")
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """A question with the known word that is most like it; nothing where none is."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]}?" if close else ""


def unknown_command(word: str, known: Iterable[str]) -> str:
    """What to tell somebody who typed a command that is not there."""
    return f"{word}: unknown command; {nearest(word, known) or 'there are: ' + ', '.join(known)}"
