"""The units of a model, and what each costs a rank: no process group, no memory (meta is enough).

A unit's numbers are those of its `UnitLayout`, the object that the engine allocates and moves by:

    kept       shards of parameters, their gradients and optimizer state (AdamW's two moments where
               nothing else is said); the shards that replicas share out (`hybrid_full_optimizer`);
               what rounding gradients lost, where a wire feeds it back
    gathered   the whole parameters, while the unit runs
    received   what a rank takes in per micro-batch: (W-1)/W of what is gathered or reduced, twice
               that of what is summed over replicas
    refreshed  what it takes in besides, once per optimizer step, of shards that replicas share out
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from shardwise.layout import (
    MixedPrecisionPolicy,
    ParamSpec,
    Strategy,
    UnitLayout,
    Wire,
    layout_unit,
    strategy_named,
)
from shardwise.layout.policy import goes_with_stats
from shardwise.layout.unit import Collective

EXACT = Wire()


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """One `fully_shard` call."""

    name: str
    modules: tuple[str, ...]
    strategy: Strategy
    transport: str
    layout: UnitLayout
    is_root: bool
    num_states: int = 2  # tensors that the optimizer keeps of each parameter; AdamW's moments
    halves_states: bool = False  # they are bfloat16, whatever the parameter is
    wire: Wire = EXACT
    is_state_elsewhere: bool = False  # than the parameters: in host memory, in files

    @property
    def numel(self) -> int:
        return sum(p.numel for b in self.layout.buckets for p in b.params)

    @property
    def state_bytes(self) -> int:
        """Of the optimizer, beside the parameters."""
        return 0 if self.is_state_elsewhere else self.all_state_bytes

    @property
    def all_state_bytes(self) -> int:
        """Wherever it is: torch makes it like the parameter, as it makes the gradient."""
        layout = self.layout
        return self.num_states * (
            2 * layout.num_trained if self.halves_states else layout.grad_bytes
        )

    @property
    def kept_bytes(self) -> int:
        """Parameters, gradients and optimizer state of a rank at the end of a backward."""
        layout = self.layout
        parameters = layout.shard_bytes + layout.middle_bytes
        return parameters + layout.grad_bytes + layout.feedback_bytes + self.state_bytes

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """With a strategy by name the root's copy goes after the forward like all others."""
        return self.layout.collectives()

    @property
    def received_bytes(self) -> int:
        """Per micro-batch with a reduction."""
        return self._received(self.collectives)

    @property
    def refreshed_bytes(self) -> int:
        """Once per optimizer step."""
        return self._received(self.layout.refreshes)

    def _received(self, collectives: Sequence[Collective]) -> int:
        bucket = self.layout.buckets[0]
        ranks = {"replicate": bucket.replicas, "shard": bucket.world}
        return round(sum(c.received_bytes(ranks[c.axis]) for c in collectives))


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """All units in the order of the model, the root last."""

    units: tuple[PlannedUnit, ...]
    world: int
    replicas: int

    @property
    def kept_bytes(self) -> int:
        return sum(u.kept_bytes for u in self.units)

    @property
    def gathered_bytes(self) -> int:
        """The most that is gathered at a time: the root's, what strategies keep, and the largest
        other unit.
        """
        root = self.units[-1]
        kept = [u for u in self.units[:-1] if u.strategy.lifetime != "use"]
        passing = [u.layout.full_bytes for u in self.units[:-1] if u.strategy.lifetime == "use"]
        always = root.layout.full_bytes + sum(u.layout.full_bytes for u in kept)
        return always + max(passing, default=0)

    @property
    def received_bytes(self) -> int:
        return sum(u.received_bytes for u in self.units)

    @property
    def refreshed_bytes(self) -> int:
        return sum(u.refreshed_bytes for u in self.units)


def plan_model(
    model: nn.Module,
    groups: Sequence[Sequence[str]],
    *,
    strategy: str,
    policy: MixedPrecisionPolicy,
    world: int,
    replicas: int = 1,
    transport: str = "auto",
    wire: Wire = EXACT,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    num_states: int = 2,
    halves_states: bool = False,
    is_state_elsewhere: bool = False,
    on_accelerator: bool = False,
) -> PlannedModel:
    """Lay out `model` as `shard_model` would.

    Args:
        model: unsharded, on any device.
        groups: of `choose_units`.
        strategy, policy, transport, wire: as in `shard_model`.
        world: ranks of the shard axis; for `no_shard` of all.
        replicas: ranks of the replicate axis.
        overrides: by the name of a unit's first module, "" for the root.
        num_states, halves_states, is_state_elsewhere: of the optimizer, see `PlannedUnit`.
        on_accelerator: parts are padded as they are there.
    """
    seen: set[int] = set()
    units = []
    for group in [*groups, [""]]:
        usual = {"strategy": strategy, "transport": transport, "wire": wire}
        own: dict[str, Any] = {**usual, **(overrides or {}).get(group[0], {})}
        chosen = strategy_named(own["strategy"])
        specs = _specs(model, group, seen)
        alone = chosen.shard is None
        layout = layout_unit(
            group[0] or "(root)",
            specs,
            strategy=chosen,
            policy=policy,
            world=1 if alone else world,
            replicas=world * replicas if alone else replicas,
            wire=own["wire"],
            on_accelerator=on_accelerator,
        )
        name, mover = group[0] or "(root)", str(own["transport"])
        if mover == "auto" and not own["wire"].is_plain:
            mover = "c10d"  # the only one of ours that takes wire formats
        state = num_states, halves_states, own["wire"], is_state_elsewhere
        units.append(PlannedUnit(name, tuple(group), chosen, mover, layout, not group[0], *state))
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    units.sort(key=lambda unit: (unit.is_root, order[unit.modules[0]]))
    return PlannedModel(tuple(units), world, replicas)


def _specs(model: nn.Module, group: Sequence[str], seen: set[int]) -> list[ParamSpec]:
    specs = []
    for name in group:
        module = model.get_submodule(name)
        for key, param in module.named_parameters():
            if id(param) in seen:
                continue
            seen.add(id(param))
            full = f"{name}.{key}" if name else key
            keeps = goes_with_stats(param, module.get_submodule(key.rpartition(".")[0])._buffers)
            specs.append(ParamSpec.of(full, tuple(param.shape), param, keeps_dtype=keeps))
    return specs
