"""Looking into a running engine: what it does, in order, and what it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.nn as nn

from shardwise.engine.core.reduction import Reduction
from shardwise.engine.core.state import units_in
from shardwise.engine.core.unit import Unit
from shardwise.engine.module import adopt_if_new
from shardwise.events import EventLog


@contextlib.contextmanager
def record_events(model: nn.Module) -> Iterator[EventLog]:
    """Write down gathers, forwards, backwards, reductions and releases of `model` while the body
    runs.
    """
    adopt_if_new(model)
    recorder = _Recorder(EventLog())
    for moments in {u.context.moments: None for u in units_in(model)}:
        moments.add(recorder)
    try:
        yield recorder.log
    finally:
        for moments in {u.context.moments: None for u in units_in(model)}:
            moments.remove(recorder)


class _Recorder:
    """Listens, and writes down what the golden texts are made of."""

    def __init__(self, log: EventLog) -> None:
        self.log = log

    def called(self, unit: Unit) -> None:
        self.log.add("F", unit.name)

    def reached(self, unit: Unit) -> None:
        self.log.add("B", unit.name)

    def gathering(self, unit: Unit) -> None:
        self.log.add("AG", unit.name)

    def filling(self, unit: Unit) -> None:
        self.log.add("HG", unit.name)

    def issued(self, unit: Unit, reductions: list[Reduction]) -> None:
        if reductions:
            self.log.add("RS", unit.name)

    def delivered(self, unit: Unit) -> None:
        self.log.add("G", unit.name)

    def released(self, unit: Unit) -> None:
        self.log.add("FR", unit.name)


def gathered_bytes(model: nn.Module) -> int:
    """Bytes of gathered parameters that are held right now, over all units."""
    return sum(b.gathered_bytes for u in units_in(model) for b in u.buckets if b.bucket is not None)
