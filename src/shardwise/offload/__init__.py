"""State of optimizers outside of the device: in host memory, or in files on a disk."""

from shardwise.offload.kept import SlotSource, StoredSlot
from shardwise.offload.optimizer import OffloadedOptimizer

__all__ = ["OffloadedOptimizer", "SlotSource", "StoredSlot"]
