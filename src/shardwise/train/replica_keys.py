"""Keys of [replicas]: what they do not go with. Nothing here imports torch."""

from __future__ import annotations

from shardwise.train.config import Config, mesh_shape, resolved_strategy


def replica_ineffective(config: Config) -> dict[str, tuple[str, str]]:
    """See `config_checks.ineffective`."""
    if config.replicas.coordinator:
        return {}
    return {f"replicas.{key}": ("replicas.coordinator", "is empty") for key in ("name", "wire")}


def replica_problems(config: Config, world_size: int) -> list[tuple[str, str]]:
    """See `config_checks.world_problems`."""
    section, found = config.replicas, []
    if not section.coordinator:
        return found
    host, _, port = section.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        text = f"{section.coordinator!r} is no address; write host:port"
        found.append(("replicas.coordinator", text))
    if mesh_shape(config, world_size)[0] > 1:
        text = "is for replicas of one job, which meet in every step; replicas.* are jobs: use 1"
        found.append(("mesh.replicate", text))
    if resolved_strategy(config) == "no_shard" and world_size > 1:
        text = "each rank would send the whole model; use full_shard"
        found.append(("shard.strategy", text))
    if config.run.reproducible == "any_world":
        text = "any_world cannot hold where replicas come and go; use off or same_world"
        found.append(("run.reproducible", text))
    if config.offload.optimizer != "none":
        text = "the optimizer would not see the weights that replicas agree on; use none"
        found.append(("offload.optimizer", text))
    return found
