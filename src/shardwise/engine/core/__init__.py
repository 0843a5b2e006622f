"""The kernel: one unit's parameters and gradients move between shards and full tensors.

Reading order: `parameter` and `bucket` (memory), `build` (from modules), `gradients`, `unit` (one
unit's moments), `context`, `call`, `backward` (who calls them when).
"""
