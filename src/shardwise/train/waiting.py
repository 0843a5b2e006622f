"""Waits that are no trouble are told once, by name: one rank reads the data, or writes the model,
and says that it is at it; the others wait for that.

What the engine logs of a long wait (`comm/waits`) is a warning, with a line for each rank. That of
an exchange (`Ranks`) for which some rank is at work and none is stopped or gone becomes
"rank 1 waits for rank 0: ..." here.
"""

from __future__ import annotations

import logging
import re

_EXCHANGE = re.compile(r"has waited \d+ s for (all ranks|rank 0), ")
_LINE = re.compile(r"^  rank (\d+): (.*)$", re.MULTILINE)
_BUSY = re.compile(r"at work: (.*), for \d+ s")
_TROUBLE = "(process "


class Patience(logging.Filter):
    """On the logger of waits, in the process of one rank of a job."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self._told = rank, set[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the warning stays one."""
        said = record.getMessage()
        lines = {int(rank): text for rank, text in _LINE.findall(said)}
        busy = {rank: found[1] for rank, text in lines.items() if (found := _BUSY.fullmatch(text))}
        has_trouble = any(_TROUBLE in text for text in lines.values())
        if not busy or has_trouble or not _EXCHANGE.search(said):
            return True
        if self._rank == min(lines.keys() - busy.keys(), default=-1):  # one speaks for all
            self._tell(busy)
        return False

    def _tell(self, busy: dict[int, str]) -> None:
        rank, what = next(iter(busy.items()))
        others = f" and {len(busy) - 1} more" if len(busy) > 1 else ""
        text = f"rank {self._rank} waits for rank {rank}{others}: {what}"
        if text not in self._told:
            self._told.add(text)
            print(text, flush=True)


def be_patient(rank: int) -> None:
    """Waits of this process are told so."""
    logging.getLogger("shardwise.comm.waits").addFilter(Patience(rank))
