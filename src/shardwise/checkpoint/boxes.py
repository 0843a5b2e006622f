"""Boxes: rectangular parts of a tensor, as (start, size) in each dim.

A chunk of a file is a box, a rank's shard is a box, and what one needs of the other is their
intersection.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_CORNERS = 2**22


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
    """Why boxes do not cover a tensor exactly once; empty if they do.

    Each corner of a box counts 1 or -1, by the number of its dims in which it is the far one. The
    sums over all boxes are those of the whole exactly if every element is covered once: they are
    the mixed differences of how often each element is covered. So no two boxes are compared.
    """
    whole = Box.whole(shape)
    for box in boxes:
        inside = len(box.start) == len(whole.size) and all(
            a >= 0 and n >= 0 and a + n <= full
            for a, n, full in zip(box.start, box.size, whole.size, strict=True)
        )
        if not inside:
            return f"part {box.start} + {box.size} is not inside of {tuple(shape)}"
    filled = [box for box in boxes if box.numel]
    total = sum(box.numel for box in filled)
    if total != whole.numel:
        return f"its parts have {total} of {whole.numel} elements"
    cut = [d for d, n in enumerate(whole.size) if any(box.size[d] != n for box in filled)]
    if len(filled) << len(cut) > _MAX_CORNERS:
        return f"{len(filled)} parts, cut along {len(cut)} dims, are more than can be checked"
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in [(1, whole), *((-1, box) for box in filled)] if cut else ():
        for far in itertools.product((0, 1), repeat=len(cut)):
            place = tuple(box.start[d] + f * box.size[d] for d, f in zip(cut, far, strict=True))
            corners[place] += sign * (-1) ** sum(far)
    wrong = min((place for place, count in corners.items() if count), default=None)
    return "" if wrong is None else f"its parts overlap, or leave a gap, at {wrong} of dims {cut}"
