"""What a configuration may not ask for beside `mesh.tensor`, by key."""

from __future__ import annotations

from shardwise.train.config import Config, DecoderConfig, HFModelConfig
from shardwise.train.optimizer_keys import OF_WHOLES
from shardwise.units import counted


def tensor_problems(config: Config) -> list[tuple[str, str]]:
    """See `config_checks.problems`."""
    size = config.mesh.tensor
    if size < 2:
        return []
    model = config.model
    wrong = {
        "model.kind": not isinstance(model, DecoderConfig | HFModelConfig)
        and "is a model of your own, for which nobody knows where to split; call "
        "torch's parallelize_module in a program of your own (docs/parallelism.md)",
        "lora.rank": config.lora.rank > 0 and "splits no adapters; leave one of the two out",
        "run.reproducible": config.run.reproducible == "any_world"
        and "any_world adds up in an order that does not know the tensor ranks; use same_world",
        "optim.kind": config.optim.kind in OF_WHOLES
        and f"{config.optim.kind} needs matrices that are cut over one mesh dim; use adamw",
        "shard.gather_wire": config.shard.gather_wire != "exact" and "takes exact only",
        "shard.reduce_wire": config.shard.reduce_wire != "exact" and "takes exact only",
        "shard.host_ranks": config.shard.host_ranks > 1 and "takes 0 only",
        "shard.compile": config.shard.compile and "takes false only",
        "shard.offload_activations": config.shard.offload_activations and "takes false only",
        "offload.parameters": config.offload.parameters != "none" and "takes none only",
        "offload.optimizer": config.offload.optimizer != "none" and "takes none only",
        "optim.in_backward": config.optim.in_backward and "takes false only",
        "log.samples": bool(config.log.samples) and "generates nothing on the way; leave it empty",
        "replicas.coordinator": bool(config.replicas.coordinator) and "has no replicas that meet",
    }
    found = [(key, f"mesh.tensor = {size}: {text}") for key, text in wrong.items() if text]
    if isinstance(model, DecoderConfig):
        heads = {"model.heads": model.heads, "model.kv_heads": model.num_kv_heads}
        for key, count in heads.items():
            if count % size:
                found.append((key, f"{count} cannot be shared by {size} tensor ranks evenly"))
        if config.data.seq_len % size:
            text = f"{config.data.seq_len} tokens cannot be shared by {size} tensor ranks evenly"
            found.append(("data.seq_len", text))
    return found


def tensor_world_problems(config: Config, world_size: int) -> list[tuple[str, str]]:
    """See `config_checks.world_problems`."""
    size = config.mesh.tensor
    if world_size % size == 0:
        return []
    text = f"{size} tensor ranks do not divide the {counted(world_size, 'rank')} of this job"
    return [("mesh.tensor", f"{text}; start a multiple of {size}, or use a factor of {world_size}")]
