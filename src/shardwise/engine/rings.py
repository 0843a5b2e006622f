"""The rings around the kernel: who registers with it, in the order in which they are told.

`core.moments` says what listeners hear of; `core.bucket` which kinds of buckets there are. Whoever
comes from outside registers in the same way, and is told after these.
"""

from __future__ import annotations

import functools

from shardwise.engine.core import bucket, moments
from shardwise.engine.guards.ledger import Ledgers
from shardwise.engine.guards.views import Views
from shardwise.engine.services.prefetch import Prefetch
from shardwise.engine.services.step_in_backward import UnitSteps
from shardwise.engine.services.tokens import Tokens
from shardwise.engine.subclasses import ExtensionBucket

LISTENERS = (Views, Prefetch, Tokens, UnitSteps, Ledgers)
BUCKETS = (ExtensionBucket,)


@functools.cache
def register_rings() -> None:
    """Once in a process, before the first unit."""
    for listener in LISTENERS:
        moments.register(listener)
    for kind in BUCKETS:
        bucket.register_kind(kind)
