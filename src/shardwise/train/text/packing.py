"""First fit: each document goes into the first row that has room for it.

    rows of 8      a a a b b b b _      c c c c c d d _      documents a 3, c 5, b 4, d 2

A tree over the rows holds the most room of each half, so finding the first takes a few steps
however many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shardwise.train.order import Int64Array


def first_fit(lengths: Iterable[int], room: int) -> list[list[int]]:
    """Rows of positions in `lengths`, none longer than `room` together."""
    lengths = list(lengths)
    size = 1 << max(0, len(lengths) - 1).bit_length()
    free = [room] * (2 * size)  # free[1] is the root, free[size + i] row i
    rows: list[list[int]] = []
    for position, length in enumerate(lengths):
        if length > room:
            raise ValueError(f"document {position} has {length} tokens, a row {room}")
        at = 1
        while at < size:
            at *= 2
            at += free[at] < length
        row = at - size
        if row == len(rows):
            rows.append([])
        rows[row].append(position)
        free[at] -= length
        while at > 1:
            at //= 2
            free[at] = max(free[2 * at], free[2 * at + 1])
    return rows


def one_each(count: int) -> list[list[int]]:
    """Rows without packing."""
    return [[position] for position in range(count)]


def flat(rows: list[list[int]]) -> tuple[Int64Array, Int64Array]:
    """Rows as one array of positions and the end of each row in it."""
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    return np.array([p for row in rows for p in row], dtype=np.int64), ends
