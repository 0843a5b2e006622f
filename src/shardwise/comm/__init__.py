"""Communication: the `Transport` protocol and its implementations.

Reading order: `transport` (the seam) -> `c10d` -> `shared_memory` -> `fake` -> `choose` (which one
serves a mesh).
"""
