"""`shard_model`: apply `fully_shard` bottom-up to the right modules of a whole model."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.streams import streams_for
from shardwise.comm.transport import Transport
from shardwise.engine.api import fully_shard
from shardwise.engine.core.state import state_of
from shardwise.engine.mesh.axes import default_device
from shardwise.engine.module import FSDPModule
from shardwise.engine.services.activations import Activations
from shardwise.engine.services.grouping import choose_units
from shardwise.engine.services.prefetch import set_prefetch
from shardwise.layout import MixedPrecisionPolicy, OffloadPolicy, Strategy, Wire

_OVERRIDABLE = {
    "mesh",
    "mp_policy",
    "offload_policy",
    "reshard_after_forward",
    "strategy",
    "transport",
    "wire",
}


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
    activation_checkpointing: bool | str = False,
    offload_activations: bool = False,
    gather_limit: int | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    wire: Wire = Wire(),  # noqa: B008  (frozen)
) -> Any:
    """Shard a whole model in place: `fully_shard` on its units, innermost first, then on the model.

    What is not said of an argument here is said of that of `fully_shard`.

    Args:
        model: the model, on a real device or on meta (then call `materialize` afterwards).
        unit: "auto", class names or name patterns, or a size in bytes; see `grouping`.
        activation_checkpointing: True ("full") recomputes every unit's forward in the backward,
            inside the unit, so that parameters are gathered twice a step as without it.
            "selective" keeps the results of matrix products and attention. Not for the root.
        offload_activations: what the units save for their backward waits in host memory; on
            accelerators only.
        gather_limit: bytes of gathered parameters that prefetching may reach, see `set_prefetch`.
        overrides: other arguments of `fully_shard` for units whose module name has a pattern
            ("blocks.0", "*.experts.*"; "" for the root): {pattern: {"strategy": ...}}. The first
            pattern that fits counts.

    Returns:
        `model`, now also an `FSDPModule`.

    Raises:
        ValueError: a unit or a pattern that names nothing, or a setting that cannot be.
    """
    activations = Activations.named(activation_checkpointing, offload_activations)
    computes_on_host = (mesh.device_type if mesh else default_device()) == "cpu"
    if offload_activations and computes_on_host and not streams_for(torch.device("cpu")).is_async:
        raise ValueError(
            "offload_activations=True: on CPU activations are in host memory already; leave it out"
        )
    chosen = choose_units(model, unit)
    special = override_for(chosen, overrides or {})
    settings: dict[str, Any] = {
        "mesh": mesh,
        "strategy": strategy,
        "transport": transport,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "reshard_after_forward": reshard_after_forward,
        "wire": wire,
    }
    for group in chosen:
        modules = [model.get_submodule(name) for name in group]
        modules = [m for m in modules if not isinstance(m, FSDPModule)]
        if not modules:
            continue
        own = {**settings, **special.get(group[0], {})}
        fully_shard(modules if len(modules) > 1 else modules[0], **own)
        for module in modules:
            state = state_of(module)
            assert state is not None
            state.around = None if activations.is_plain else activations.run
    if not isinstance(model, FSDPModule):
        fully_shard(model, **{**settings, **special.get("", {})})
    if gather_limit is not None:
        set_prefetch(model, gather_limit=gather_limit)
    return model


def override_for(
    groups: Sequence[Sequence[str]], overrides: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """The override of each unit that has one, by the name of its first module."""
    found: dict[str, Mapping[str, Any]] = {}
    used: set[str] = set()
    for name in (*(group[0] for group in groups), ""):
        for pattern, override in overrides.items():
            if fnmatch.fnmatchcase(name, pattern) and (name or not pattern):
                found[name] = override
                used.add(pattern)
                break
    for pattern, override in overrides.items():
        unknown = sorted(set(override) - _OVERRIDABLE)
        if unknown:
            raise ValueError(
                f"overrides[{pattern!r}]: {', '.join(unknown)} cannot be set for one unit; "
                f"{', '.join(sorted(_OVERRIDABLE))} can"
            )
        if pattern not in used:
            names = ", ".join(repr(group[0]) for group in groups[:8])
            raise ValueError(
                f"overrides: no unit has the name {pattern!r}, or an earlier pattern took it; "
                f"units are {names}{', ...' if len(groups) > 8 else ''} and '' (the root)"
            )
    return found
