"""Errors that shardwise raises on purpose: one base class, one class for each kind of remedy.

A message says what was expected, what was found, where (parameter, unit, axis, rank) and what to
do.
"""

from __future__ import annotations


class ShardwiseError(Exception):
    """Base of every error that shardwise defines."""


class ConfigError(ShardwiseError, ValueError):
    """A configuration that cannot be run: a wrong key, value or combination."""


class UsageError(ShardwiseError, ValueError, AssertionError):
    """A call that cannot be; torch's FSDP2 answers it with an AssertionError."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that cannot be written, read or used here."""


class OffloadError(ShardwiseError, RuntimeError):
    """State outside of the device that cannot be written or read back; names the file."""


class TransportError(ShardwiseError, RuntimeError):
    """A transport that cannot be opened or that lost a peer."""


class UnavailableError(TransportError):
    """A transport that cannot be opened here: a mistake in what was asked for, or in the
    environment."""


class PeerTimeoutError(TransportError):
    """A peer did not arrive within the time limit; says who waits for whom: step, phase, unit."""


class DivergenceError(ShardwiseError, RuntimeError):
    """The ranks did different things: other units, other order, other weights."""


class EngineError(ShardwiseError, RuntimeError):
    """The engine was used at the wrong moment; names the unit and the remedy."""


class NonFiniteError(ShardwiseError, RuntimeError):
    """Gradients hold nan or inf; `where` maps parameters to the (global) ranks that hold them."""

    def __init__(self, text: str, where: dict[str, list[int]] | None = None) -> None:
        super().__init__(text)
        self.where = where or {}


class TrainingError(ShardwiseError, RuntimeError):
    """A training job that cannot go on: a loss that is no number, a rank that is lost."""
