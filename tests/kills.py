"""Kills with -9 at every step that an action takes in a folder.

A child process runs the action and is killed just before the n-th time that it opens a file there
to write, renames or removes one: for n = 1, 2, ... until the action comes to its end. The names are
those of Python's audit events.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_EVENTS = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "os.truncate"}


def killed_at_each_step(action: Callable[[], object], folder: Path) -> Iterator[int]:
    """Yields n after the child that was killed there has ended; what it has left is there to see.
    The child that came to its end is not yielded."""
    number = 0
    while True:
        number += 1
        child = os.fork()
        if not child:
            _run(action, str(folder), number)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, "the action failed"
            assert number > 1, "the action writes nothing there"
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
        yield number


def _run(action: Callable[[], object], folder: str, number: int) -> None:
    left = number

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event == "open":
            mode, flags = args[1], args[2]
            writes = any(c in (mode or "") for c in "wax+") or (flags or 0) & os.O_ACCMODE
        else:
            writes = event in _EVENTS
        if writes and any(str(a).startswith(folder) for a in args[:2]):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        sys.addaudithook(hook)
        action()
        code = 0
    finally:
        os._exit(code)
