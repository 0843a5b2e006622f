"""Finds a user's `package.module:function`, beside the configuration file or on Python's path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError


def load_factory(key: str, name: str, search_dir: Path | None) -> Callable[[dict[str, Any]], Any]:
    """The function that `name` means; `key` is the configuration key, for errors.

    Like `python script.py`, it looks in the configuration's folder first, then in the working
    directory.
    """
    places = [str(d.resolve()) for d in (search_dir, Path.cwd()) if d is not None]
    folders = list(dict.fromkeys(places))
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module was found; what it imports was not
        raise ConfigError(
            f"{key}: no module {module_name!r} in {' or '.join(folders)} or on Python's path"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key}: {module.__file__} has no function {function_name!r}")
    return function
