"""How two sources differ: names, shapes, dtypes, values, objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.source import PIECE_BYTES, Source
from shardwise.checkpoint.state import RNG


@dataclass(slots=True)
class Comparison:
    """`changed` holds (key, what differs)."""

    only_left: list[str] = field(default_factory=list)
    only_right: list[str] = field(default_factory=list)
    changed: list[tuple[str, str]] = field(default_factory=list)
    num_equal: int = 0

    def __bool__(self) -> bool:
        return bool(self.only_left or self.only_right or self.changed)

    def to_json(self) -> dict[str, Any]:
        return {
            "only_left": self.only_left,
            "only_right": self.only_right,
            "changed": dict(self.changed),
            "num_equal": self.num_equal,
        }


def compare(left: Source, right: Source, prefix: str = "") -> Comparison:
    """All tensors and values whose keys begin with `prefix`, piece by piece; ties are looked
    through."""
    found = Comparison()
    ours, theirs = _all_names(left, prefix), _all_names(right, prefix)
    found.only_left = sorted(ours.keys() - theirs.keys())
    found.only_right = sorted(theirs.keys() - ours.keys())
    for name in sorted(ours.keys() & theirs.keys()):
        what = _difference(left, ours[name], right, theirs[name])
        if what:
            found.changed.append((name, what))
        else:
            found.num_equal += 1
    for key in sorted(left.objects.keys() | right.objects.keys()):
        what = _other_value(left.objects.get(key), right.objects.get(key))
        if key.startswith(prefix) and what:
            found.changed.append((key, what.removeprefix(": ").removeprefix(".")))
    return found


def _other_value(one: Any, other: Any) -> str:
    """Where two values differ first, and how; empty if they are equal."""
    if str(one) == str(other):
        return ""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [k for k in (*one, *other) if str(one.get(k, _NONE)) != str(other.get(k, _NONE))]
        if keys:
            inner = _other_value(one.get(keys[0], _NONE), other.get(keys[0], _NONE))
            more = len(set(keys)) - 1
            return f".{keys[0]}{inner}" + (f" (and {more} more)" if more else "")
    return f": {_shown(one)} and {_shown(other)}"


_NONE = "nothing"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _all_names(source: Source, prefix: str) -> dict[str, str]:
    names = {**{k: k for k in source.tensors}, **source.ties}
    return {name: key for name, key in names.items() if name.startswith(prefix)}


def _difference(left: Source, a: str, right: Source, b: str) -> str:
    one, other = left.tensors[a], right.tensors[b]
    if one.shape != other.shape:
        return f"shape {list(one.shape)} and {list(other.shape)}"
    if one.dtype != other.dtype:
        return f"{one.dtype} and {other.dtype}"
    count, largest = 0, 0.0
    for box in _boxes(one.shape, one.dtype.itemsize):
        x, y = torch.empty(box.size, dtype=one.dtype), torch.empty(box.size, dtype=one.dtype)
        left.read(a, box, x)
        right.read(b, box, y)
        if torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8)):
            continue
        x, y = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (x, y))
        unequal = x != y
        count += int(unequal.sum())
        if not a.startswith(RNG):
            largest = max(largest, float((x - y).abs().max()))
    return f"{count} elements differ, by up to {largest:.3g}" if count else ""


def _boxes(shape: tuple[int, ...], itemsize: int) -> list[Box]:
    whole = Box.whole(shape)
    if not shape or not whole.numel:
        return [whole] if whole.numel else []
    step = max(1, PIECE_BYTES // (whole.numel // shape[0] * itemsize))
    return [whole.rows(r, min(r + step, shape[0])) for r in range(0, shape[0], step)]
