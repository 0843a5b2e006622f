"""How long a rank waits for another before it says so, and before it gives up.

    SHARDWISE_WAIT_WARN_S    5    a wait this long is logged, with where every rank is
    SHARDWISE_WAIT_LIMIT_S   120  a wait this long is a PeerTimeoutError, on all ranks

`set_wait_limit` changes both for this process; call it on all ranks alike. Read at every wait, so
it may be called at any time.
"""

from __future__ import annotations

import math
import os

from shardwise.errors import ConfigError

LIMIT_VARIABLE = "SHARDWISE_WAIT_LIMIT_S"
WARN_VARIABLE = "SHARDWISE_WAIT_WARN_S"
START_AGAIN = " Who catches this is out of step, in later models too: start all ranks again."
_DEFAULTS = {LIMIT_VARIABLE: 120.0, WARN_VARIABLE: 5.0}

_chosen: dict[str, float] = {}


def set_wait_limit(seconds: float | None = None, *, warn_after: float | None = None) -> None:
    """How long this rank waits for others.

    Args:
        seconds: a wait longer than this is a PeerTimeoutError that says where every rank is; None
            goes back to `SHARDWISE_WAIT_LIMIT_S` (120).
        warn_after: a wait longer than this is logged first; None: `SHARDWISE_WAIT_WARN_S` (5).
    """
    for name, value in ((LIMIT_VARIABLE, seconds), (WARN_VARIABLE, warn_after)):
        if value is None:
            _chosen.pop(name, None)
        elif not 0 < value < math.inf:
            raise ValueError(f"set_wait_limit: expected positive seconds, found {value!r}")
        else:
            _chosen[name] = float(value)


def wait_limit_s() -> float:
    """Seconds after which a wait is an error."""
    return _chosen.get(LIMIT_VARIABLE) or _from_environment(LIMIT_VARIABLE)


def warn_after_s() -> float:
    """Seconds after which a wait is logged."""
    return _chosen.get(WARN_VARIABLE) or _from_environment(WARN_VARIABLE)


def _from_environment(name: str) -> float:
    text = os.environ.get(name)
    try:
        value = float(text) if text else _DEFAULTS[name]
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}: expected seconds as a positive number, found {text!r}")
    return value
