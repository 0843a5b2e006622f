"""Keys of [shard] about wire formats: what they switch off, what they do not go with.

Nothing here imports torch before `wire_of` is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.train.config import (
    HYBRID,
    Config,
    mesh_shape,
    parse_override,
    resolved_strategy,
)

if TYPE_CHECKING:
    from shardwise.layout import Wire

_TAKES_WIRES = ("auto", "c10d")


def wire_of(config: Config) -> Wire:
    """What the keys ask for."""
    from shardwise.layout import Wire

    section = config.shard
    return Wire(
        gather=section.gather_wire,
        reduce=section.reduce_wire,
        block=section.wire_block,
        error_feedback=section.error_feedback,
        host_ranks=section.host_ranks,
    )


def is_wired(config: Config) -> bool:
    """Whether anything travels in another way than usual."""
    section = config.shard
    return section.host_ranks > 1 or section.gather_wire != "exact" or _rounds_sums(config)


def _rounds_sums(config: Config) -> bool:
    return config.shard.reduce_wire != "exact"


def wire_ineffective(config: Config) -> dict[str, tuple[str, str]]:
    """See `config_checks.ineffective`."""
    found: dict[str, tuple[str, str]] = {}
    if "int8" not in (config.shard.gather_wire, config.shard.reduce_wire):
        why = f"is {config.shard.reduce_wire!r}, like shard.gather_wire: only int8 has blocks"
        if config.shard.gather_wire != config.shard.reduce_wire:
            why = f"is {config.shard.reduce_wire!r}: only int8 has blocks"
        found["shard.wire_block"] = "shard.reduce_wire", why
    if not _rounds_sums(config):
        found["shard.error_feedback"] = "shard.reduce_wire", "is 'exact', so nothing is lost"
    return found


def wire_problems(config: Config) -> list[tuple[str, str]]:
    """See `config_checks.problems`."""
    section, found = config.shard, []
    block = section.wire_block
    if block < 16 or block % 16:
        found.append(("shard.wire_block", f"{block} is no multiple of 16; use 128"))
    if not is_wired(config):
        return found
    key = _key(config)
    if section.transport not in _TAKES_WIRES:
        text = f"needs shard.transport = c10d (or auto), not {section.transport}"
        found.append((key, text))
    strategy, level = resolved_strategy(config), config.run.reproducible
    for name in dict.fromkeys([strategy, *_overridden(config, "strategy")]):
        if section.gather_wire != "exact" and name == "no_shard":
            found.append(("shard.gather_wire", "no_shard gathers nothing; leave it exact"))
        if section.host_ranks > 1 and name in (*HYBRID, "no_shard"):
            text = f"{name} has no shard axis across hosts; leave it out, or use full_shard"
            found.append(("shard.host_ranks", text))
    found += [
        ("shard.overrides", f"transport {name} takes no wire formats; c10d does")
        for name in _overridden(config, "transport")
        if name not in _TAKES_WIRES
    ]
    if level == "any_world" and (section.gather_wire != "exact" or _rounds_sums(config)):
        text = f"run.reproducible = {level} needs exact ones: blocks depend on the ranks"
        found.append((key, text))
    elif level == "any_world":
        text = f"run.reproducible = {level} has an order of sums of its own; leave one off"
        found.append((key, text))
    if level != "off" and section.error_feedback:
        text = "is in no checkpoint, so a resume gives other numbers; run.reproducible needs it off"
        found.append(("shard.error_feedback", text))
    return found


def wire_world_problems(config: Config, world_size: int) -> list[tuple[str, str]]:
    """See `config_checks.world_problems`."""
    inside, (_, shard) = config.shard.host_ranks, mesh_shape(config, world_size)
    if 1 < inside < shard and shard % inside:
        text = f"{inside} ranks of a host are no factor of the {shard} that share the model"
        return [("shard.host_ranks", text)]
    return []


def _key(config: Config) -> str:
    """The one that asks for something."""
    if config.shard.gather_wire != "exact":
        return "shard.gather_wire"
    return "shard.reduce_wire" if _rounds_sums(config) else "shard.host_ranks"


def _overridden(config: Config, what: str) -> list[str]:
    """What `shard.overrides` gives to units; entries with mistakes have errors of their own."""
    found = []
    for entry in config.shard.overrides:
        try:
            _, chosen = parse_override(entry)
        except ValueError:
            continue
        found += [chosen[what]] if what in chosen else []
    return found
