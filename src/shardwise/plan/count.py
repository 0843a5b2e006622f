"""A model of which only the number of parameters is known: equal units, laid out as the engine
would.
"""

from __future__ import annotations

import torch

from shardwise.layout import MixedPrecisionPolicy, ParamSpec, layout_unit, strategy_named
from shardwise.plan.model import PlannedModel, PlannedUnit


def plan_count(
    num_params: int,
    *,
    strategy: str,
    world: int,
    replicas: int = 1,
    num_units: int = 32,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype = torch.bfloat16,
) -> PlannedModel:
    """Lay out `num_params` parameters in `num_units` units of one size.

    Args:
        strategy, world, replicas: as in `plan_model`.
        dtype: of the parameters, so of gradients and moments.
        compute: what is gathered and computed in.
    """
    chosen = strategy_named(strategy)
    alone = chosen.shard is None
    units = []
    for number in range(num_units):
        numel = num_params // num_units + (number < num_params % num_units)
        name = f"unit {number}"
        layout = layout_unit(
            name,
            [ParamSpec("weights", (numel,), dtype)],
            strategy=chosen,
            policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=dtype),
            world=1 if alone else world,
            replicas=world * replicas if alone else replicas,
        )
        units.append(PlannedUnit(name, (name,), chosen, "auto", layout, is_root=False))
    return PlannedModel(tuple(units), world, replicas)
