"""The best evaluation so far: which checkpoint to keep, and when to stop early.

It is worked out from the rows of metrics.jsonl, so a run that was interrupted judges like one that
was not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Best:
    """`loss` at `step` is the lowest val_loss; `since` counts the evaluations after that."""

    loss: float = math.inf
    step: int = 0
    since: int = 0

    @classmethod
    def of_rows(cls, rows: Iterable[dict[str, Any]]) -> Best:
        best = cls()
        for row in rows:
            if "val_loss" in row and row["step"] > 0:  # of what training made, not of the start
                best.take(row["step"], row["val_loss"])
        return best

    def take(self, step: int, loss: float) -> bool:
        """One more evaluation; whether it is the best."""
        if loss < self.loss:
            self.loss, self.step, self.since = loss, step, 0
            return True
        self.since += 1
        return False

    def has_lost(self, patience: int) -> bool:
        """Whether that many evaluations in a row were no better; 0: never."""
        return 0 < patience <= self.since

    def __str__(self) -> str:
        return f"val_loss has not fallen below {self.loss:.4f} of step {self.step}"
