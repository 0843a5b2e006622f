"""Options of the commands that argparse reads: a mistake is one line, like all others."""

from __future__ import annotations

import argparse
import difflib
from typing import NoReturn

from shardwise.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """Mistakes become a `ConfigError`, one line, with the nearest option."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0]
            known = [option for action in self._actions for option in action.option_strings]
            close = difflib.get_close_matches(word.partition("=")[0], known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"{self.prog} --help lists options"
            raise ConfigError(f"{word}: unknown option; {hint}")
        raise ConfigError(message.removeprefix("argument "))
