"""`shard_model`: apply `fully_shard` bottom-up to the right modules of a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.transport import Transport
from shardwise.engine.api import fully_shard
from shardwise.engine.grouping import choose_units
from shardwise.engine.module import FSDPModule
from shardwise.engine.state import state_of
from shardwise.layout import MixedPrecisionPolicy, OffloadPolicy, Strategy


def shard_model(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str | Strategy | None = None,
    unit: str | int | Sequence[str] = "auto",
    transport: str | Transport = "auto",
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    reshard_after_forward: bool | int | None = None,
    activation_checkpointing: bool = False,
) -> Any:
    """Shard a whole model in place: `fully_shard` on its units, innermost first, then on the model.

    Args:
        model: the model, on a real device or on meta (then call `materialize` afterwards).
        mesh, strategy, transport, mp_policy, offload_policy, ignored_params,
            reshard_after_forward: as in `fully_shard`.
        unit: "auto", class names or name patterns, or a size in bytes; see `grouping`.
        activation_checkpointing: recompute every unit's forward in the backward. The recomputation
            runs inside the unit, so its parameters are gathered twice a step as without it.

    Returns:
        `model`, now also an `FSDPModule`.
    """
    chosen = choose_units(model, unit)
    settings: dict[str, Any] = {
        "mesh": mesh,
        "strategy": strategy,
        "transport": transport,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "reshard_after_forward": reshard_after_forward,
    }
    for group in chosen:
        modules = [model.get_submodule(name) for name in group]
        modules = [m for m in modules if not isinstance(m, FSDPModule)]
        if not modules:
            continue
        fully_shard(modules if len(modules) > 1 else modules[0], **settings)
        for module in modules:
            state = state_of(module)
            assert state is not None
            state.recompute = activation_checkpointing
    if not isinstance(model, FSDPModule):
        fully_shard(model, **settings)
    return model
