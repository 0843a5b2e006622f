"""One forward of the real model on the first sample, before anything is written: what the model's
own code refuses is one line.

`config.json` may hold any value, and most are looked at only when they are used. Who raised the
error is read from its traceback: below torch, the model's own code or ours. The forward is that of
training (dropout is on), keeps nothing for a backward, and leaves random streams as they were.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import numpy as np
import torch
from torch import nn

import shardwise
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.rng import capture_rng, restore_rng
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.train.calling import outputs_of
from shardwise.train.data import Data
from shardwise.train.hf.description import one_line
from shardwise.train.hf.prepare import origin_of
from shardwise.train.running import to_device

_TORCH, _OURS = (Path(module.__file__ or "").parent for module in (torch, shardwise))


def check_forward(data: Data, model: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """ConfigError where the forward of a model from `prepare` fails. Collective."""
    ranks.on_each(lambda: _try(data, model, device), "trying the model")


def _try(data: Data, model: nn.Module, device: torch.device) -> None:
    # The same one on all ranks, so that it fails on all.
    batch = to_device(data.train.batch(np.zeros(1, dtype=np.int64)), device)
    was_training, states = model.training, capture_rng()
    model.train()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            outputs_of(model, batch)
    except ShardwiseError:
        raise
    except Exception as error:
        place = _place(error)
        if not place or "memory" in str(error).lower():
            raise
        path = origin_of(model).described.path
        raise ConfigError(
            f"model.path: {path}: the model's own forward fails on the first sample: "
            f"{type(error).__name__}: {one_line(error)} ({place}); look at the values of "
            f"{path / 'config.json' if path.is_dir() else path.name}"
        ) from error
    finally:
        model.train(was_training)
        restore_rng(states)


def _place(error: Exception) -> str:
    """The line of the model's own code that an error comes from; empty where it is ours."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_OURS):
            return ""
        if path.is_file() and not path.is_relative_to(_TORCH):
            return f"{path.name}, line {frame.lineno}"
    return ""
