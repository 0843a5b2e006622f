"""A tally: what one bucket saw between two ends of a backward. `guards.ledger` checks it there.

Kept where things happen, by those who do them, so that one that forgets does not agree with the
others:

    told        a gradient was found in an accumulator, by hook or look      (mask of parameters)
    num_told    ... how often
    num_taken   a gradient went into a reduction or a partial sum            (how often)
    waiting     ... into a reduction that was not issued yet                 (mask)
    lost        ... but its buffer does not have it when it is issued        (mask)
    issued, delivered     reductions issued; reductions whose result reached `.grad` or was kept
    repeated    reductions of one backward that had nothing new in them
"""

from __future__ import annotations


class Tally:
    """See the module docstring; masks have bit i for parameter i."""

    __slots__ = (
        "delivered",
        "issued",
        "lost",
        "num_taken",
        "num_told",
        "repeated",
        "told",
        "trainable",
        "waiting",
    )

    def __init__(self) -> None:
        self.trainable = 0  # of the last forward
        self.clear()

    def clear(self) -> None:
        """A backward is over, by its end or by an exception."""
        self.told = self.num_told = self.num_taken = self.waiting = self.lost = 0
        self.issued = self.delivered = self.repeated = 0

    @property
    def is_settled(self) -> bool:
        """All rules that need no look at parameters hold, and every gradient was told."""
        return (
            self.num_told == self.num_taken
            and not self.waiting
            and not self.lost
            and self.issued == self.delivered
            and not self.repeated
            and self.told == self.trainable
        )
