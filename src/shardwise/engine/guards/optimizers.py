"""Optimizers that hold tensors which are no parameters any more.

An optimizer built before `fully_shard`, or while a unit is gathered, holds the original or the full
tensors: it would go on training those, and the model would stand still. Such tensors know what they
became (`param.home_of`), so the optimizer is given the sharded parameters instead: at the model's
first forward for optimizers that exist by then, in a hook before every step for later ones. State
follows where the tensor was sharded alike (loaders assign shards); of another shape, it is refused.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.engine.core.parameter import home_of
from shardwise.errors import EngineError


@functools.cache
def watch_optimizers() -> None:
    """Look at every optimizer before its step. Registered once in a process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    repoint(optimizer)


def repoint_all() -> None:
    """Look at every optimizer that is alive. Walks the garbage collector's list: call it once.

    Instances refer to their class. `gc.get_objects()` would take references to everything, also to
    tuples that another thread is just building, which fails there with a SystemError.
    """
    classes: list[type] = [torch.optim.Optimizer]
    for cls in classes:
        classes.extend(c for c in cls.__subclasses__() if c not in classes)
    for thing in gc.get_referrers(*classes):
        # type() and not isinstance(), which asks lazy proxies for their __class__
        if issubclass(type(thing), torch.optim.Optimizer) and "param_groups" in vars(thing):
            repoint(thing)


def repoint(optimizer: torch.optim.Optimizer) -> None:
    """Replace tensors that became sharded parameters by those."""
    for group in optimizer.param_groups:
        params = group["params"]
        for i, held in enumerate(params):
            home = home_of(held)
            if home is None or held is home.sharded:
                continue
            state = optimizer.state.get(held)
            if state and getattr(held, "_spec", None) != getattr(home.sharded, "_spec", None):
                raise EngineError(
                    f"{home.name}: the optimizer {type(optimizer).__name__} holds state for the "
                    "tensor that this parameter was before it was sharded; build the optimizer "
                    "after fully_shard, and load its state with "
                    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
                )
            if optimizer.state.pop(held, None):
                optimizer.state[home.sharded] = state
            params[i] = home.sharded
