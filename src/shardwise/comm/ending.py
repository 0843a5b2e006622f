"""The end of a process that has used Gloo.

A thread of Gloo gives a finished collective's tensors back a moment after the one who waited goes
on, and needs Python's lock for it. Where the program ends in that moment, Python ends the thread,
and the process dies with "terminate called without an active exception" (pytorch issue 190489;
torch alone dies so too). So the program's end waits until these threads sleep.
"""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LIMIT_S, _LOOK_S, _TWICE = 1.0, 0.001, 2


def wait_at_exit() -> None:
    """From now on. May be called again."""
    atexit.unregister(wait_for_gloo)
    atexit.register(wait_for_gloo)


def wait_for_gloo() -> None:
    """Until its threads have slept at two looks in a row, or a second has passed. Sleeping here
    gives them the lock. Nothing where there is no /proc."""
    slept, until = 0, time.monotonic() + _LIMIT_S
    while slept < _TWICE and time.monotonic() < until:
        time.sleep(_LOOK_S)
        slept = slept + 1 if all(state == "S" for state in _states()) else 0


def _states() -> list[str]:
    found = []
    tasks = Path(f"/proc/{os.getpid()}/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        try:
            if (task / "comm").read_text().strip() == _NAME:
                found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        except OSError:  # it has ended
            continue
    return found
