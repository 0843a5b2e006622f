"""The shared-memory transport: CPU ranks of one host read each other's memory.

Reading order: `futex` (waiting, memory order) -> `arena` (memory) -> `control` (what ranks say) ->
`access` (how they find each other) -> `domain` (phases and fences, with the ordering argument) ->
`gather` -> `slots`, `sums`, `grads`, `mailbox`, `reductions` -> `transport`.
"""

from shardwise.comm.shared_memory.transport import SharedMemoryTransport, shared_memory_reason

__all__ = ["SharedMemoryTransport", "shared_memory_reason"]
