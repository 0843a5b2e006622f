"""Looking into a running engine: what it does, in order, and what it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.nn as nn

from shardwise.engine.core.state import units_in
from shardwise.engine.module import adopt_if_new
from shardwise.events import EventLog


@contextlib.contextmanager
def record_events(model: nn.Module) -> Iterator[EventLog]:
    """Write down gathers, forwards, backwards, reductions and releases of `model` while the body
    runs.
    """
    adopt_if_new(model)
    contexts = {id(u.context): u.context for u in units_in(model)}
    log = EventLog()
    before = {key: context.log for key, context in contexts.items()}
    for context in contexts.values():
        context.log = log
    try:
        yield log
    finally:
        for key, context in contexts.items():
            context.log = before[key]


def gathered_bytes(model: nn.Module) -> int:
    """Bytes of gathered parameters that are held right now, over all units."""
    return sum(b.gathered_bytes for u in units_in(model) for b in u.buckets if b.bucket is not None)
