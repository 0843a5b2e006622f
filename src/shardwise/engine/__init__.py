"""The engine: parameters that are sharded at rest, whole while they are used, and gradients that
come back as shards.

Reading order: `shard_tensor` (what a parameter is) -> `mesh` -> `param`, `bucket`, `build` (one
unit's memory) -> `gradients`, `unit` (one unit's moments) -> `context`, `forward`, `backward` (who
calls them when) -> `module`, `api`.
"""
