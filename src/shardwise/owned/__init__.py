"""Optimizers that need whole matrices, and optimizers that know nothing of DTensor."""

from shardwise.owned.local import local_view
from shardwise.owned.optimizer import OwnedOptimizer

__all__ = ["OwnedOptimizer", "local_view"]
