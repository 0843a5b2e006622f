"""Asking a job to stop: SIGTERM, the first Ctrl-C, or the launcher's stop file.

A request only sets a flag; the loop reads it once a step, all ranks agree, save and exit 0. A
second signal ends the process at once, as it would without us.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType

STOP_FILE_VARIABLE = "SHARDWISE_STOP_FILE"
LAUNCHER_VARIABLE = "SHARDWISE_LAUNCHER_PID"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether this process was asked to stop, and by what."""

    def __init__(self) -> None:
        self._by = ""
        name = os.environ.get(STOP_FILE_VARIABLE)
        self._file = Path(name) if name else None

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self._on_signal)

    @property
    def by(self) -> str:
        """What asked for it (`SIGTERM`), or an empty string."""
        if not self._by and self._file is not None and self._file.exists():
            self._by = self._file.read_text() or "the launcher"
        return self._by

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._by = signal.Signals(number).name
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)
