"""The random state of this process (torch CPU and current GPU, Python, numpy) as tensors, and
back."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import CheckpointError


def capture_rng() -> dict[str, Tensor]:
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().cpu()
    # JSON, not pickle: reading a checkpoint must not be able to run code.
    states["python"] = _to_tensor(random.getstate())
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states["numpy"] = _to_tensor([kind, np.asarray(keys).tolist(), position, has_gauss, cached])
    return states


def restore_rng(states: dict[str, Tensor]) -> None:
    try:  # what is a state, those who take it know
        torch.set_rng_state(states["torch"])
        if torch.cuda.is_available() and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])
        version, internal, gauss_next = _from_tensor(states["python"])
        random.setstate((version, tuple(internal), gauss_next))
        np.random.set_state(tuple(_from_tensor(states["numpy"])))
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"its random state is none of this version: {error!r}") from None


def seed_rng(seed: int, step: int, rank: int) -> None:
    """Fresh streams for a rank that has none to continue: at the start, or on another world
    size."""
    mixed = int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])
    torch.manual_seed(mixed % 2**63)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)


def _to_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())
