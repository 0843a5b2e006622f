"""What must hold between the keys of a configuration, alone and on a number of ranks.

    ineffective(config)            keys that other keys switch off: setting one is an error
    problems(config)               what is wrong on any number of ranks
    world_problems(config, ranks)  what is wrong on that many
    fitted_batches(...)            sizes of batches that nobody chose, made to fit the ranks

Each finding is a key with what to do about it; `config_file.py` says where the key was set.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from shardwise.comm.choose import is_known, unknown_transport
from shardwise.train.config import (
    HYBRID,
    Config,
    DecoderConfig,
    HFModelConfig,
    OptimConfig,
    TrainConfig,
    chunk_bytes,
    gather_limit,
    is_factory,
    mesh_shape,
    own_keys,
    parse_override,
)
from shardwise.train.optimizer_keys import OF_WHOLES, num_states, takes
from shardwise.train.replica_keys import replica_ineffective, replica_problems
from shardwise.train.tensor_keys import tensor_problems, tensor_world_problems
from shardwise.train.text.keys import has_texts, text_ineffective, text_problems
from shardwise.train.trackers import tracker_problem
from shardwise.train.wire_keys import wire_ineffective, wire_problems, wire_world_problems
from shardwise.units import counted


def ineffective(config: Config) -> dict[str, tuple[str, str]]:
    """Keys that have no effect: the key that makes them so, and how."""
    found: dict[str, tuple[str, str]] = {}
    sources = config.data.source if isinstance(config.data.source, tuple) else (config.data.source,)
    if is_factory(config.data.source):
        for key in ("data.seq_len", "data.held_out", "data.token_dtype"):
            found[key] = "data.source", f"is {config.data.source!r}, which makes its own samples"
    elif has_texts(config.data):
        found["data.token_dtype"] = "data.format", f"is {config.data.format!r}"
    elif not any(s.endswith(".bin") for s in sources):
        found["data.token_dtype"] = "data.source", "names no .bin file, and only these need it"
    found |= text_ineffective(config.data, is_factory(config.data.source))
    if isinstance(config.model, DecoderConfig):
        found["train.chunked_loss"] = "model.kind", "is 'decoder', no model of transformers"
    if not isinstance(config.model, HFModelConfig):
        found["checkpoint.export"] = "model.kind", f"is {config.model.kind!r}, not 'hf'"
    if config.lora.rank == 0:
        for key in ("alpha", "dropout", "targets"):
            found[f"lora.{key}"] = "lora.rank", "is 0"
    if config.train.eval_every == 0:
        found["train.eval_samples"] = "train.eval_every", "is 0"
        wanted = {"train.patience": config.train.patience, "log.samples": config.log.samples}
        wanted["checkpoint.best"] = config.checkpoint.best
        wanted["train.eval_at_start"] = config.train.eval_at_start
        found |= {key: ("train.eval_every", "is 0") for key, value in wanted.items() if value}
    if not config.log.samples:
        found["log.sample_tokens"] = "log.samples", "is empty"
    if config.offload.optimizer != "nvme":
        found["offload.directory"] = "offload.optimizer", f"is {config.offload.optimizer!r}"
    if config.offload.optimizer == "none":
        for key in ("chunk", "step_on", "in_background"):
            found[f"offload.{key}"] = "offload.optimizer", "is 'none'"
    found |= replica_ineffective(config)
    return found | _ineffective_of_optim(config.optim) | wire_ineffective(config)


def _ineffective_of_optim(optim: OptimConfig) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    if optim.schedule == "constant":
        found["optim.final_lr_ratio"] = "optim.schedule", "is 'constant'"
    if optim.schedule != "wsd":
        found["optim.decay_share"] = "optim.schedule", f"is {optim.schedule!r}"
    if not num_states(optim.kind, own_keys(optim)):
        found["optim.state_dtype"] = "optim.momentum", f"is 0, and {optim.kind} keeps nothing else"
    for key in ("betas", "weight_decay"):
        if not takes(optim.kind, key):
            found[f"optim.{key}"] = "optim.kind", f"is {optim.kind!r}, which has none"
    if not takes(optim.kind, "weight_decay"):
        found["optim.no_decay"] = "optim.kind", f"is {optim.kind!r}, which has no weight decay"
    elif optim.weight_decay == 0:
        found["optim.no_decay"] = "optim.weight_decay", "is 0"
    if optim.kind != "muon":
        found["optim.adamw"] = "optim.kind", f"is {optim.kind!r}"
    return found


# Lower bounds (inclusive) of the numbers; None stands for "above zero".
_AT_LEAST: dict[str, float | None] = {
    "run.seed": 0,
    "run.threads": 0,
    "model.dim": 1,
    "model.layers": 1,
    "model.heads": 1,
    "model.kv_heads": 0,
    "model.hidden": 0,
    "model.vocab_size": 2,
    "model.rope_theta": None,
    "lora.rank": 0,
    "lora.alpha": None,
    "lora.dropout": 0,
    "data.seq_len": 1,
    "train.steps": 1,
    "train.global_batch": 1,
    "train.micro_batch": 1,
    "train.grad_clip": 0,
    "train.eval_every": 0,
    "train.eval_samples": 1,
    "optim.lr": None,
    "optim.weight_decay": 0,
    "optim.warmup_steps": 0,
    "optim.final_lr_ratio": 0,
    "optim.decay_share": 0,
    "mesh.replicate": 1,
    "mesh.tensor": 1,
    "shard.wire_block": 16,
    "shard.host_ranks": 0,
    "checkpoint.every": 0,
    "checkpoint.memory_every": 0,
    "checkpoint.keep": 0,
    "log.every": 1,
    "log.sample_tokens": 1,
    "train.patience": 0,
}


def problems(config: Config) -> list[tuple[str, str]]:
    """What is wrong with a configuration on any number of ranks: (key, what to do) pairs."""
    found = _number_problems(config)
    if found:  # the checks below may divide by these numbers
        return found
    model, data = config.model, config.data
    if isinstance(model, DecoderConfig):
        found += _decoder_problems(model)
    if isinstance(model, HFModelConfig) and not model.path:
        text = "is empty; name a directory of a model, or a config.json for new weights"
        found.append(("model.path", text))
    found += _lora_problems(config)
    if not 0 < data.held_out < 1 and not (has_texts(data) and data.held_out == 0):
        found.append(("data.held_out", f"{data.held_out} is not between 0 and 1"))
    if not data.source:
        found.append(("data.source", "is empty; name files, or use 'stdlib'"))
    if any(not 0 <= b < 1 for b in config.optim.betas):
        found.append(("optim.betas", f"{list(config.optim.betas)} are not all in [0, 1)"))
    if config.optim.decay_share > 1:
        found.append(("optim.decay_share", f"{config.optim.decay_share} is above 1"))
    if config.optim.final_lr_ratio > 1:
        found.append(("optim.final_lr_ratio", f"{config.optim.final_lr_ratio} is above 1"))
    if config.mesh.shard != -1 and config.mesh.shard < 1:
        found.append(
            ("mesh.shard", f"{config.mesh.shard} is neither -1 (all that are left) nor >= 1")
        )
    if isinstance(config.shard.unit, int) and config.shard.unit < 1:
        found.append(("shard.unit", f"{config.shard.unit} bytes is not a size"))
    found += text_problems(config)
    found += _log_problems(config)
    found += _strategy_problems(config)
    found += _memory_problems(config)
    found += wire_problems(config)
    found += _offload_problems(config) + _whole_problems(config) + tensor_problems(config)
    if config.run.reproducible == "any_world":
        found += _any_world_problems(config)
    return found


def _number_problems(config: Config) -> list[tuple[str, str]]:
    found = []
    for key, low in _AT_LEAST.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name, None)
        if value is None:  # a decoder key under a custom model
            continue
        if value != value or value in (float("inf"), float("-inf")):
            found.append((key, f"{value} is not a number to compute with"))
        elif low is None and not value > 0:
            found.append((key, f"{value} is not above 0"))
        elif low is not None and not value >= low:
            found.append((key, f"{value} is below {low:g}"))
    return found


def _decoder_problems(model: DecoderConfig) -> list[tuple[str, str]]:
    if model.dim % model.heads or (model.dim // model.heads) % 2:
        text = f"{model.heads} heads do not cut model.dim = {model.dim} into parts of even width"
        return [("model.heads", text)]
    if model.heads % model.num_kv_heads:
        text = f"{model.kv_heads} does not divide model.heads = {model.heads}"
        return [("model.kv_heads", text)]
    return []


def _lora_problems(config: Config) -> list[tuple[str, str]]:
    lora, model = config.lora, config.model
    if not lora.rank:
        return []
    if not isinstance(model, HFModelConfig):
        return [("lora.rank", f"adapters need model.kind = 'hf', not {model.kind!r}")]
    if model.path.endswith(".json"):
        text = "adapters need weights to stand beside; name a directory in model.path"
        return [("lora.rank", text)]
    if not lora.targets:
        return [("lora.targets", "is empty; use all-linear, or name modules")]
    return [("lora.dropout", f"{lora.dropout} is not below 1")] if lora.dropout >= 1 else []


def _log_problems(config: Config) -> list[tuple[str, str]]:
    found = []
    if why := tracker_problem(config.log.trackers):
        found.append(("log.trackers", why))
    if config.log.samples and not isinstance(config.model, HFModelConfig):
        text = f"needs model.kind = 'hf', with a tokenizer; it is {config.model.kind!r}"
        found.append(("log.samples", text))
    if any(step < 1 for step in config.log.profile_steps):
        found.append(("log.profile_steps", f"{list(config.log.profile_steps)} has a step below 1"))
    elif (last := max(config.log.profile_steps, default=0)) > config.train.steps:
        text = f"{last} is above train.steps = {config.train.steps}: it would never be traced"
        found.append(("log.profile_steps", text))
    return found


def _strategy_problems(config: Config) -> list[tuple[str, str]]:
    strategy, replicate = config.shard.strategy, config.mesh.replicate
    if strategy in HYBRID and replicate == 1:
        return [("shard.strategy", f"{strategy} needs mesh.replicate above 1; or use full_shard")]
    if strategy not in ("auto", *HYBRID) and replicate > 1:
        text = (
            f"{replicate} replicas need shard.strategy {' or '.join(HYBRID)} (or auto), "
            f"not {strategy}"
        )
        return [("mesh.replicate", text)]
    return []


def _memory_problems(config: Config) -> list[tuple[str, str]]:
    found = []
    limit = gather_limit(config)
    if limit is None or limit < 0:
        text = f"{config.shard.gather_limit!r} is no size; write bytes, or for example 256MiB"
        found.append(("shard.gather_limit", text))
    if not is_known(config.shard.transport):
        found.append(("shard.transport", unknown_transport(config.shard.transport)))
    for entry in config.shard.overrides:
        try:
            parse_override(entry)
        except ValueError as error:
            found.append(("shard.overrides", str(error)))
    if config.optim.in_backward and config.train.grad_clip:
        text = "the global norm is known only after the backward; set train.grad_clip = 0"
        found.append(("optim.in_backward", text))
    if config.optim.in_backward and config.run.reproducible == "any_world":
        text = "any_world adds up all micro-batches before the step; leave one of them off"
        found.append(("optim.in_backward", text))
    return found


def _offload_problems(config: Config) -> list[tuple[str, str]]:
    found, offload = [], config.offload
    size = chunk_bytes(config)
    if size is None or size < 2**16:
        text = f"{offload.chunk!r} is no size of 64KiB or more; write bytes, or for example 16MiB"
        found.append(("offload.chunk", text))
    if offload.optimizer == "nvme" and not offload.directory:
        text = "is empty; offload.optimizer = 'nvme' needs a directory on a local disk"
        found.append(("offload.directory", text))
    if offload.optimizer == "nvme" and config.checkpoint.background:
        text = "would copy the optimizer's state from its files into memory; leave it out, or use "
        found.append(("checkpoint.background", text + "offload.optimizer = 'cpu'"))
    if offload.optimizer != "none" and not num_states(config.optim.kind, own_keys(config.optim)):
        text = f"{config.optim.kind} keeps no state (optim.momentum is 0); leave it out"
        found.append(("offload.optimizer", text))
    return found


def _whole_problems(config: Config) -> list[tuple[str, str]]:
    """Of optimizers that step whole tensors, each by its owner."""
    kind = config.optim.kind
    if kind not in OF_WHOLES:
        return []
    text = f"{kind} needs whole matrices, which all ranks bring to their owners together"
    wrong = {
        "optim.in_backward": config.optim.in_backward,
        "optim.state_dtype": config.optim.state_dtype != "param",
        "offload.optimizer": config.offload.optimizer != "none",
        "shard.strategy": config.shard.strategy == "hybrid_full_optimizer",
    }
    return [(key, f"{text}; leave it out") for key, is_wrong in wrong.items() if is_wrong]


def _any_world_problems(config: Config) -> list[tuple[str, str]]:
    found = []
    if config.shard.reduce_dtype != "float32":
        text = f"{config.shard.reduce_dtype} sums; run.reproducible = any_world needs float32"
        found.append(("shard.reduce_dtype", text))
    batch, micro = config.train.global_batch, config.train.micro_batch
    if batch % micro:
        nearest = nearest_multiple(batch, micro)
        text = f"{batch} is not a multiple of train.micro_batch = {micro}; use {nearest}"
        found.append(("train.global_batch", text))
    return found


def world_problems(config: Config, world_size: int) -> list[tuple[str, str]]:
    """What is wrong with a configuration on that many ranks."""
    if found := tensor_world_problems(config, world_size):
        return found
    data = world_size // config.mesh.tensor  # ranks that read samples of their own
    replicate, shard = mesh_shape(config, world_size)
    if replicate * shard != data:
        if config.mesh.shard == -1:
            text = f"{replicate} replicas cannot share {counted(data, 'rank')} evenly"
            found.append(("mesh.replicate", text))
        else:
            of = "this job" if data == world_size else "this job's data axis"
            text = f"{counted(replicate, 'replica')} x {counted(shard, 'shard')} are "
            text += f"{counted(replicate * shard, 'rank')}, not the {data} of {of}; "
            found.append(("mesh.shard", f"{text}use -1 for all that are left"))
    found += wire_world_problems(config, world_size)
    found += replica_problems(config, world_size)
    if config.run.reproducible == "any_world":
        return found  # micro-batches need not fit the ranks
    batch, micro = config.train.global_batch, config.train.micro_batch
    if batch % (data * micro):
        nearest = nearest_multiple(batch, data * micro)
        ranks = counted(data, "rank" if data == world_size else "data rank")
        text = f"{batch} is not a multiple of {ranks}; use {nearest}"
        if micro > 1:
            text = (
                f"{batch} is not a multiple of {ranks} x micro_batch {micro} = "
                f"{data * micro}; use {nearest}, or another train.micro_batch"
            )
        found.append(("train.global_batch", text))
    return found


def fitted_batches(train: TrainConfig, world_size: int, chosen: Container[str]) -> TrainConfig:
    """Sizes of batches for that many ranks: those that are not chosen fit those that are. A global
    batch that nobody chose is the nearest that ranks share evenly, a micro-batch the largest that
    is no larger than its default."""
    batch, micro = train.global_batch, train.micro_batch
    if "train.global_batch" not in chosen:
        part = world_size * (micro if "train.micro_batch" in chosen else 1)
        batch = nearest_multiple(batch, part)
    if "train.micro_batch" not in chosen:
        share = batch // world_size if batch % world_size == 0 else 1
        micro = next(size for size in range(min(micro, share), 0, -1) if share % size == 0)
    return replace(train, global_batch=batch, micro_batch=micro)


def nearest_multiple(number: int, of: int) -> int:
    return max(of, round(number / of) * of)
