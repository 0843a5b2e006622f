"""Boxes: rectangular parts of a tensor, as (start, size) in each dim.

A chunk of a file is a box, a rank's shard is a box, and what one needs of the other is their
intersection.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(a + n for a, n in zip(self.start, self.size, strict=True))

    def rows(self, first: int, last: int) -> Box:
        """Rows [first, last) of this box, counted from its own start."""
        return Box((self.start[0] + first, *self.start[1:]), (last - first, *self.size[1:]))

    def meet(self, other: Box) -> Box | None:
        """What both cover; None if that is nothing."""
        start = tuple(map(max, self.start, other.start))
        size = tuple(min(a, b) - s for a, b, s in zip(self.stop, other.stop, start, strict=True))
        return Box(start, size) if all(n > 0 for n in size) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `outer`."""
        pairs = zip(self.start, self.size, outer.start, strict=True)
        return tuple(slice(a - o, a - o + n) for a, n, o in pairs)


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Why boxes do not cover a tensor exactly once; empty if they do."""
    whole = Box.whole(shape)
    for box in boxes:
        inside = len(box.start) == len(whole.size) and all(
            a >= 0 and n >= 0 and a + n <= full
            for a, n, full in zip(box.start, box.size, whole.size, strict=True)
        )
        if not inside:
            return f"part {box.start} + {box.size} is not inside of {tuple(shape)}"
    filled = sorted(box for box in boxes if box.numel)
    total = sum(box.numel for box in filled)
    if total != whole.numel:
        return f"its parts have {total} of {whole.numel} elements"
    if _is_one_row_of_boxes(filled):
        return ""
    for i, box in enumerate(filled):
        for other in filled[i + 1 :]:
            if box.meet(other) is not None:
                return f"parts at {box.start} and {other.start} overlap"
    return ""


def _is_one_row_of_boxes(boxes: Sequence[Box]) -> bool:
    """True when each sorted box begins where the one before it ends, along one dim: the usual cut,
    without comparing all pairs."""
    for a, b in itertools.pairwise(boxes):
        moved = [d for d in range(len(a.start)) if a.start[d] != b.start[d]]
        if len(moved) != 1 or a.stop[moved[0]] != b.start[moved[0]]:
            return False
        if any(a.size[d] != b.size[d] for d in range(len(a.size)) if d != moved[0]):
            return False
    return True
