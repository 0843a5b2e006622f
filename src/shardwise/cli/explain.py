"""`shardwise explain`: which units a job will have, what each costs, and why. Runs nothing.

Takes the arguments of `train`; the model is built on the meta device where its factory allows it.
Exit codes: 0, 2 a mistake (one line on stderr). With --json one object on stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError
from shardwise.train.command import parse
from shardwise.train.config import (
    gather_limit,
    mesh_shape,
    parse_override,
    resolved_strategy,
    world_problems,
)
from shardwise.train.config_file import LoadedConfig, load_config
from shardwise.units import text_of_bytes

if TYPE_CHECKING:
    from shardwise.plan.model import PlannedModel

_HELP = """usage: shardwise explain [CONFIG.toml] [--section.key value ...] [--nproc N] [--json]

Shows the units that `shardwise train` would make with the same arguments: what is gathered
together, under which strategy and transport, and what it costs a rank in memory and
communication. Nothing is run and nothing is allocated. --nproc defaults to 2."""


def main(arguments: Sequence[str]) -> int:
    """Runs `explain` and returns its exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(_HELP)
        return 0
    as_json = "--json" in arguments
    try:
        parsed = parse([a for a in arguments if a != "--json"])
        loaded = load_config(parsed.config_file, parsed.overrides)
        num_ranks = parsed.nproc or 2
        for key, text in world_problems(loaded.config, num_ranks):
            raise loaded.error(key, text)
        plan, why = _plan(loaded, num_ranks)
    except ConfigError as error:
        print(f"shardwise explain: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(_as_json(plan, why, num_ranks)))
    else:
        _print(plan, why, num_ranks)
    return 0


def _plan(loaded: LoadedConfig, num_ranks: int) -> tuple[PlannedModel, list[str]]:
    from shardwise.engine.grouping import choose_units
    from shardwise.engine.shard_model import override_for
    from shardwise.plan.model import plan_model
    from shardwise.train.model import build_model, policy_of, unit_of_config

    config = loaded.config
    model = build_model(config, loaded.path.parent if loaded.path else None)
    groups = choose_units(model, unit_of_config(config))
    overrides = dict(parse_override(entry) for entry in config.shard.overrides)
    replicas, world = mesh_shape(config, num_ranks)
    plan = plan_model(
        model,
        groups,
        strategy=resolved_strategy(config),
        policy=policy_of(config),
        world=world,
        replicas=replicas,
        transport=config.shard.transport,
        overrides=override_for(groups, overrides),
    )
    return plan, [*loaded.notes, *_reasons(loaded, plan)]


def _reasons(loaded: LoadedConfig, plan: PlannedModel) -> list[str]:
    shard = loaded.config.shard
    if shard.unit == "auto":
        unit = (
            "unit auto: blocks that repeat a class; small neighbours share a unit; an embedding or "
            "head that outweighs the blocks gets its own; the root takes the rest"
        )
    else:
        unit = f"unit {shard.unit!r}: as asked for"
    transport = {
        "auto": "transport auto: shared memory where all ranks run on the CPU of one host and can "
        "read each other's memory, else c10d (Gloo, NCCL)",
        "c10d": "transport c10d: as asked for",
        "shared_memory": "transport shared_memory: as asked for; an error where it cannot work",
    }[shard.transport]
    strategy = resolved_strategy(loaded.config)
    source = "auto: by mesh.replicate" if shard.strategy == "auto" else "as asked for"
    limit = gather_limit(loaded.config)
    ahead = f"up to {text_of_bytes(limit)}" if limit else "one unit ahead"
    return [
        unit,
        transport,
        f"strategy {strategy}: {source}; {plan.replicas} replica(s) x {plan.world} shard(s)",
        f"gathered ahead of use: {ahead} on accelerators, nothing on CPU",
    ]


def _row(unit: Any) -> dict[str, Any]:
    return {
        "unit": unit.name,
        "modules": list(unit.modules),
        "parameters": unit.numel,
        "strategy": unit.strategy.name,
        "transport": unit.transport,
        "kept_bytes": unit.kept_bytes,
        "gathered_bytes": unit.layout.full_bytes,
        "collectives": len(unit.collectives),
        "received_bytes": unit.received_bytes,
        "refreshed_bytes": unit.refreshed_bytes,
    }


def _as_json(plan: PlannedModel, why: list[str], num_ranks: int) -> dict[str, Any]:
    return {
        "ranks": num_ranks,
        "replicas": plan.replicas,
        "shards": plan.world,
        "units": [_row(unit) for unit in plan.units],
        "kept_bytes": plan.kept_bytes,
        "gathered_bytes": plan.gathered_bytes,
        "received_bytes": plan.received_bytes,
        "refreshed_bytes": plan.refreshed_bytes,
        "why": why,
    }


def _print(plan: PlannedModel, why: list[str], num_ranks: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(plan.units)} units on {num_ranks} rank(s)", title_justify="left")
    table.add_column("unit")
    table.add_column("strategy")
    for name in ("parameters", "kept", "gathered", "collectives", "received"):
        table.add_column(name, justify="right")
    for unit in plan.units:
        more = f" +{len(unit.modules) - 1}" if len(unit.modules) > 1 else ""
        kind = unit.strategy.name + ("" if unit.transport == "auto" else f", {unit.transport}")
        table.add_row(
            unit.name + more,
            kind,
            f"{unit.numel:,}",
            text_of_bytes(unit.kept_bytes),
            text_of_bytes(unit.layout.full_bytes),
            str(len(unit.collectives)),
            text_of_bytes(unit.received_bytes),
        )
    refreshed = plan.refreshed_bytes
    once = f" and {text_of_bytes(refreshed)} per optimizer step" if refreshed else ""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(
        f"A rank keeps {text_of_bytes(plan.kept_bytes)} (parameters, gradients, AdamW's moments), "
        f"gathers at most {text_of_bytes(plan.gathered_bytes)} at a time, and receives "
        f"{text_of_bytes(plan.received_bytes)} per micro-batch{once}. Activations come on top.",
        soft_wrap=True,
    )
    for line in why:
        console.print(f"- {line}", soft_wrap=True)
