"""`transformers` and what belongs to it, imported when a job needs it, or one line."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

from shardwise.errors import ConfigError


def library(name: str = "transformers", why: str = 'model.kind: "hf"') -> Any:
    """The module of that name; ConfigError with what to install where it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        found = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        raise ConfigError(f'{why} needs {package}{found}; pip install "shardwise[hf]"') from None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the library's own warnings and bars: what matters is said in our words, once."""
    logging = library().logging
    before, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
        if has_bar:
            logging.enable_progress_bar()
