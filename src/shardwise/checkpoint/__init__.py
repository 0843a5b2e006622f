"""Checkpoints that can be trusted: atomic directories around torch.distributed.checkpoint.

`store` knows directories (no torch), `manager` fills and reads them, `rng` captures random state.
"""
