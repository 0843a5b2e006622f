"""Reading the state of an optimizer by parameter names, without touching the optimizer.

torch's `get_optimizer_state_dict` makes the state of an optimizer that has not stepped by stepping
it with zero gradients, which leaves it one step ahead (pytorch issue 164929): the run that follows
is another one. Here a state that is absent stays absent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint import state_dict as dsd

from shardwise.checkpoint.names import parameter_names


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | tuple[torch.optim.Optimizer, ...] | list[Any],
    *,
    submodules: set[nn.Module] | None = None,
    options: dsd.StateDictOptions | None = None,
) -> dict[str, Any]:
    """As `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, except that an
    optimizer without state gives an empty `state` and is left as it is.
    """
    many = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    used = [o for o in many if o.state]
    out: dict[str, Any] = {"state": {}, "param_groups": []}
    if used:
        out = dict(
            dsd.get_optimizer_state_dict(model, used, submodules=submodules, options=options)
        )
    names = parameter_names(model)
    for optimizer in many:
        if optimizer.state:
            continue
        for group in optimizer.param_groups:
            plain = {key: value for key, value in group.items() if key != "params"}
            plain["params"] = [names[id(p)] for p in group["params"]]
            out["param_groups"].append(plain)
    return out
