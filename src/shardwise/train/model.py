"""The model of a job: built, sharded and filled with its first weights.

    model.kind = "decoder"            the built-in decoder
    model.kind = "hf"                 a causal language model of transformers: `train/hf`
    model.kind = "module:function"    function(options) -> nn.Module; options: a dict of the other
                                      keys of [model]. How it is called: `calling.py`

A factory may build on the meta device; then each module with tensors needs `reset_parameters`, and
the engine fills it unit by unit. Weights made on a real device are taken as they are: the factory
runs under the same seed on every rank.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    materialize,
    shard_model,
)
from shardwise.checkpoint.ranks import Ranks
from shardwise.engine.services.grouping import choose_units
from shardwise.engine.services.shard_model import override_for
from shardwise.errors import ConfigError
from shardwise.plan.model import PlannedModel, plan_model
from shardwise.train.config import (
    HYBRID,
    Config,
    CustomModelConfig,
    HFModelConfig,
    gather_limit,
    mesh_shape,
    own_keys,
    parse_override,
    resolved_strategy,
)
from shardwise.train.decoder import Decoder
from shardwise.train.factory import load_factory
from shardwise.train.loss.causal import use_token_loss
from shardwise.train.optimizer_keys import num_states
from shardwise.train.optimizer_state import in_bfloat16
from shardwise.train.tensor_axis import check_split, split
from shardwise.train.wire_keys import wire_of

_CHECKPOINTING: dict[str, bool | str] = {"none": False, "full": True, "selective": "selective"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(config: Config, search_dir: Path | None) -> nn.Module:
    """The whole model, unsharded, with its loss; the decoder on the meta device. Checks
    `shard.unit` and `mesh.tensor` on it."""
    model = _make_model(config, search_dir)
    use_token_loss(model, config.train.chunked_loss)
    try:
        overrides = dict(parse_override(entry) for entry in config.shard.overrides)
        override_for(choose_units(model, unit_of_config(config, model)), overrides)
    except ValueError as error:  # names that match nothing
        raise ConfigError(f"shard.{error}") from None
    check_split(model, config)
    return model


def unit_of_config(config: Config, model: nn.Module) -> str | int | list[str]:
    """`shard.unit` as the engine takes it; a model of transformers names its layers itself."""
    unit = config.shard.unit
    if unit == "auto" and isinstance(config.model, HFModelConfig):
        from shardwise.train.hf.prepare import units_of

        return units_of(model) or unit
    return list(unit) if isinstance(unit, tuple) else unit


def _make_model(config: Config, search_dir: Path | None) -> nn.Module:
    section = config.model
    if isinstance(section, HFModelConfig):
        from shardwise.train.hf.prepare import prepare

        return prepare(config)
    if not isinstance(section, CustomModelConfig):
        with torch.device("meta"):
            return Decoder(section, config.data.seq_len)
    factory = load_factory("model.kind", section.kind, search_dir)
    torch.manual_seed(config.run.seed)
    model = factory(dict(section.options))
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.kind: {section.kind} must return an nn.Module, got {type(model).__name__}"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(
            f"model.kind: {section.kind} returns a model without trainable parameters"
        )
    return model


def model_notes(model: nn.Module, config: Config) -> list[str]:
    """What to tell about the model at the start."""
    if not isinstance(config.model, HFModelConfig):
        return []
    from shardwise.train.hf.prepare import in_words

    return list(in_words(model, config))


def take_tokenizer(model: nn.Module, config: Config, ranks: Ranks) -> list[str]:
    """Lets checkpoints keep the tokenizer that goes along; what to tell about it. Collective."""
    if not isinstance(config.model, HFModelConfig):
        return []
    from shardwise.train.hf.tokenizer import beside_weights, take_along

    kept, said = ranks.on_rank0(lambda: beside_weights(model, config))
    take_along(model, kept)
    return [said] if said else []


def memory_notes(
    model: nn.Module, config: Config, world_size: int, device: torch.device
) -> list[str]:
    """What a rank will need, before anything is allocated; ConfigError where it cannot fit."""
    if not isinstance(config.model, HFModelConfig):
        return []
    from shardwise.train.hf.needs import check_room

    said, refused = check_room(model, config, world_size, device)
    if refused:
        raise ConfigError(refused)
    return [said]


def plan_of(
    model: nn.Module, config: Config, num_ranks: int, *, on_accelerator: bool | None = None
) -> PlannedModel:
    """Its units and what they cost a rank, as [shard] and [mesh] cut it; on the devices that
    [run] would find here, or where `on_accelerator` says."""
    if on_accelerator is None:
        on_accelerator = config.run.device != "cpu" and torch.cuda.is_available()
    groups = choose_units(model, unit_of_config(config, model))
    overrides = dict(parse_override(entry) for entry in config.shard.overrides)
    replicas, world = mesh_shape(config, num_ranks)
    return plan_model(
        model,
        groups,
        strategy=resolved_strategy(config),
        policy=policy_of(config),
        world=world,
        replicas=replicas,
        transport=config.shard.transport,
        wire=wire_of(config),
        overrides=override_for(groups, overrides),
        num_states=num_states(config.optim.kind, own_keys(config.optim)),
        halves_states=in_bfloat16(config.optim),
        is_state_elsewhere=is_state_elsewhere(config, on_accelerator=on_accelerator),
        on_accelerator=on_accelerator,
    )


def is_state_elsewhere(config: Config, *, on_accelerator: bool) -> bool:
    """Whether the optimizer's state takes other memory than the one that the step runs in."""
    elsewhere = ("cpu", "nvme") if on_accelerator else ("nvme",)
    return config.offload.optimizer in elsewhere or config.offload.parameters in elsewhere


def policy_of(config: Config) -> MixedPrecisionPolicy:
    """The dtypes of [shard]."""
    section = config.shard
    return MixedPrecisionPolicy(
        param_dtype=_DTYPES[section.param_dtype], reduce_dtype=_DTYPES[section.reduce_dtype]
    )


def shard(model: nn.Module, config: Config, device: torch.device, world_size: int) -> None:
    """Shards the model as [shard] and [mesh] say. A collective."""
    section = config.shard
    if not any(p.is_meta for p in model.parameters()):
        model.to(device)
    strategy = resolved_strategy(config)
    sizes, names = mesh_shape(config, world_size), ("replicate", "shard")
    if strategy not in HYBRID:
        sizes, names = (sizes[0] * sizes[1],), ("shard",)
    if config.mesh.tensor > 1:
        every = init_device_mesh(
            device.type, (*sizes, config.mesh.tensor), mesh_dim_names=(*names, "tensor")
        )
        split(model, every["tensor"])
        mesh = every[names]
    else:
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    shard_model(
        model,
        mesh=mesh,
        strategy=strategy,
        unit=unit_of_config(config, model),
        transport=section.transport,
        wire=wire_of(config),
        mp_policy=policy_of(config),
        offload_policy=CPUOffloadPolicy()
        if config.offload.parameters == "cpu"
        else OffloadPolicy(),
        activation_checkpointing=_CHECKPOINTING[section.activation_checkpointing],
        offload_activations=section.offload_activations,
        gather_limit=gather_limit(config) or None,
        overrides=dict(parse_override(entry) for entry in section.overrides),
    )
    if section.compile:
        for group in choose_units(model, unit_of_config(config, model)):
            for name in group:
                model.get_submodule(name).compile()


def fill(
    model: nn.Module, config: Config, device: torch.device, *, is_resumed: bool = False
) -> None:
    """Gives what is on meta its first weights; `is_resumed`: only memory where a checkpoint has
    them all."""
    if isinstance(config.model, HFModelConfig):
        from shardwise.train.hf.prepare import fill_prepared

        fill_prepared(model, config, device, is_resumed=is_resumed)
    elif any(p.is_meta for p in model.parameters()):
        materialize(model, device=device, seed=config.run.seed)
