"""The arguments of the Trainer of transformers, as JSON; or its `fsdp_config` alone.

Facts: transformers 5.24.0, `training_args.py` (`TrainingArguments`, `OptimizerNames`,
`_process_fsdp_args`), `trainer_utils.py` (`SchedulerType`), `optimization.py`; older names of
version 4 (`warmup_ratio`, `evaluation_strategy`, `no_cuda`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.importing import fsdp
from shardwise.importing.account import Part, shown
from shardwise.importing.common import (
    KEPT,
    NO_FLOAT16,
    ON_HOST,
    optimizer_refusal,
    translate_batches,
    translate_compute,
)
from shardwise.importing.deepspeed import translate_deepspeed
from shardwise.importing.files import read_document
from shardwise.train.optimizer_keys import OPTIMIZERS

_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_npu_fused")
_OPTIMIZERS: dict[str, str] = {
    **dict.fromkeys((*_ADAMW, "adamw_apex_fused"), "adamw"),
    **{name: name for name in ("sgd", "adagrad", "rmsprop")},
}
_SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant",
    "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine", "warmup_stable_decay": "wsd",
}  # fmt: skip
_NOTHING = (None, "", {}, False)
_LEGACY = (*("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"),
           "offload", "auto_wrap")  # fmt: skip

_SKIPPED = {
    "the engine's reductions take the place of DDP's": (
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend"
    ),
    "waits for a rank have a limit: SHARDWISE_WAIT_LIMIT_S": "ddp_timeout",
    "the job reads its data itself; see [data]": (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context remove_unused_columns label_names accelerator_config.* "
        "data_seed group_by_length train_sampling_strategy length_column_name ignore_data_skip"
    ),
    "evaluation is the mean over the held-out tokens": (
        "per_device_eval_batch_size prediction_loss_only eval_accumulation_steps "
        "eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics "
        "include_inputs_for_metrics bf16_full_eval fp16_full_eval eval_delay"
    ),
    "rank 0 has a progress bar or lines, and metrics.jsonl": (
        "log_level log_level_replica log_on_each_node logging_first_step "
        "logging_nan_inf_filter disable_tqdm include_num_input_tokens_seen logging_dir "
        "include_tokens_per_second skip_memory_metrics"
    ),
    "services are set up by their environment variables": (
        "run_name project trackio_space_id trackio_bucket_id trackio_static_space_id"
    ),
    "nothing is sent to a hub": (
        "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision"
    ),
    "checkpoints have weights, optimizer state and position, in safetensors": (
        "save_safetensors save_on_each_node save_only_model enable_jit_checkpoint "
        "restore_callback_states_from_checkpoint overwrite_output_dir"
    ),
    "the loss of a step is always the mean over all tokens of all ranks": (
        "average_tokens_across_devices"
    ),
    "val_loss decides": "metric_for_best_model greater_is_better",
    "`shardwise train` trains": "do_train do_eval do_predict",
    "belongs to the launcher": "local_rank _n_gpu",
    "is for training on TPUs": "tpu_num_cores tpu_metrics_debug",
    "the cache is off in training": "use_cache",
    "memory goes by units": "torch_empty_cache_steps",
    "the loss is computed in chunks already: train.chunked_loss": "liger_kernel_config.*",
    "says how recomputation is done": (
        "gradient_checkpointing_kwargs.use_reentrant activation_checkpointing_kwargs.use_reentrant"
    ),
    "tells how to compute in float16": "fp16_opt_level half_precision_backend fp16_backend",
    "inductor's defaults": "torch_compile_mode",
}
_SWITCHES = {
    "fp16": NO_FLOAT16,
    "push_to_hub": "nothing is sent to a hub; DIR/model is a directory that its tools take",
    "auto_find_batch_size": "the console says before the start what fits, for kind hf",
    "use_liger_kernel": "the loss has chunks of its own (train.chunked_loss); other kernels: none",
}
_REFUSED = {
    "optim_args": "an optimizer's own keys stand in [optim]",
    "optim_target_modules": "is for GaLore and APOLLO, which are not there",
    "parallelism_config": "set mesh.replicate and mesh.shard",
    "jit_mode_eval": "evaluation runs as training does",
    "tf32": "call torch.set_float32_matmul_precision in your own model's module",
    "torch_compile_backend": "units are compiled by inductor: shard.compile = true",
    "debug": "shardwise verify compares a job with plain PyTorch",
}
_HANDLED = [
    *"""output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs
    max_steps learning_rate lr_scheduler_type warmup_steps warmup_ratio optim weight_decay
    adam_beta1 adam_beta2 adam_epsilon max_grad_norm label_smoothing_factor bf16
    activation_checkpointing gradient_checkpointing_kwargs.every_n_layers
    activation_checkpointing_kwargs.every_n_layers gradient_checkpointing_kwargs.offload
    activation_checkpointing_kwargs.offload gradient_checkpointing torch_compile
    neftune_noise_alpha logging_steps logging_strategy report_to eval_strategy
    evaluation_strategy eval_steps eval_on_start save_strategy save_steps save_total_limit
    load_best_model_at_end full_determinism seed use_cpu no_cuda resume_from_checkpoint fsdp
    fsdp_config deepspeed fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params
    gradient_checkpointing_kwargs. activation_checkpointing_kwargs.""".split(),
    *_SWITCHES, *_REFUSED,
]  # fmt: skip
KEYS = {key.partition(".")[0] for key in [*_HANDLED, *" ".join(_SKIPPED.values()).split()]}
FSDP_KEYS = {*fsdp.KEYS, *(f"fsdp_{key}" for key in fsdp.KEYS)}


def translate_fsdp_config(part: Part, folder: Path) -> None:
    """The `fsdp_config` of a Trainer, in a file of its own."""
    fsdp.translate_fsdp(part, 2, 0)
    part.warn("optimizer, schedule and batches are the trainer's: set [optim] and [train]")


def translate_trainer(part: Part, folder: Path) -> None:
    """Speaks for every leaf, those of files that it names included."""
    translate_batches(
        part, "train_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", 8
    )
    steps = part.whole("max_steps")
    if steps is not None and steps > 0:
        part.becomes("max_steps", "train.steps", steps)
        part.skip("num_train_epochs", "max_steps wins")
    else:
        steps = None
        part.skip("max_steps", "the epochs say how long")
        part.refuse("num_train_epochs", "a run's length is in steps: set train.steps")
        part.warn("train.steps is not known: the Trainer counts epochs (3 unless it says so)")
    _optimizer(part)
    _schedule(part, steps)
    for key in part.names("lr_scheduler_kwargs"):
        if part.get(key) in (None, {}, ""):
            part.skip(key, "is not set")
        elif part.path(key) not in part.account.rows:
            part.refuse(key, "schedules here have no such setting")
    for key, ours in {"max_grad_norm": "train.grad_clip", "seed": "run.seed"}.items():
        if (value := part.number(key)) is not None:
            part.becomes(key, ours, value)
    if (path := part.text("output_dir")) is not None:
        part.becomes("output_dir", "run.dir", path)
    _saving_and_looking(part)
    _rest(part)
    _sharding(part, folder)
    part.finish(_SKIPPED, _HANDLED)


def _optimizer(part: Part) -> None:
    name = (part.text("optim") or "").lower()
    kind = _OPTIMIZERS.get(name) if name else "adamw"
    if kind is None:
        part.refuse("optim", optimizer_refusal(name))
        kind = "adamw"
    elif name:
        part.becomes("optim", "optim.kind", kind)
    part.sets_number("learning_rate", "optim.lr")
    part.assume("optim.lr", 5e-5, "the Trainer's default")
    betas = [part.number("adam_beta1"), part.number("adam_beta2")]
    wanted = [0.9 if betas[0] is None else betas[0], 0.999 if betas[1] is None else betas[1]]
    own = OPTIMIZERS[kind][1]
    if kind == "adamw":
        for key, value in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            if value is not None:
                part.becomes(key, "optim.betas", wanted)
        part.assume("optim.betas", wanted, "the Trainer's default")
        part.sets_number("adam_epsilon", "optim.eps")
    else:
        for key in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            part.skip(key, f"is Adam's; optim is {name}")
    if "weight_decay" in own:
        part.sets_number("weight_decay", "optim.weight_decay", "not of bias and norm")
        part.assume("optim.weight_decay", 0.0, "the Trainer's default")


def _schedule(part: Part, steps: int | None) -> None:
    name = (part.text("lr_scheduler_type") or "").lower()
    shape = _SCHEDULES.get(name) if name else "linear"
    if shape is None:
        own = "schedules here: cosine, linear, constant, wsd, each with a linear warm-up"
        part.refuse("lr_scheduler_type", own)
    elif name:
        part.becomes("lr_scheduler_type", "optim.schedule", shape)
    else:
        part.assume("optim.schedule", "linear", "the Trainer's default")
    if shape in ("linear", "cosine", "wsd"):
        _end_of_schedule(part, shape, steps)
    ratio = part.number("warmup_ratio")
    if name == "constant":
        for key in ("warmup_steps", "warmup_ratio"):
            part.skip(key, "lr_scheduler_type constant has no warm-up")
        part.assume("optim.warmup_steps", 0, "lr_scheduler_type constant has no warm-up")
        return
    warmup, key = part.number("warmup_steps"), "warmup_steps"
    if ratio and not warmup:
        warmup, key = ratio, "warmup_ratio"
    elif ratio is not None:
        part.skip("warmup_ratio", "warmup_steps wins" if ratio else "0: as if it were left out")
    if warmup is None:
        part.assume("optim.warmup_steps", 0, "the Trainer's default")
    elif 0 < warmup < 1 and steps is None:
        part.refuse(key, "a share of max_steps, which is not set: set optim.warmup_steps")
    else:
        whole = math.ceil(steps * warmup) if 0 < warmup < 1 and steps else int(warmup)
        part.becomes(key, "optim.warmup_steps", whole)


def _end_of_schedule(part: Part, shape: str, steps: int | None) -> None:
    at = "lr_scheduler_kwargs."
    rate = part.account.settings["optim.lr"].value
    for key in ("min_lr_rate", "min_lr_ratio"):
        if (share := part.number(at + key)) is not None:
            part.becomes(at + key, "optim.final_lr_ratio", float(share))
    if (least := part.number(at + "min_lr")) is not None and rate:
        part.becomes(at + "min_lr", "optim.final_lr_ratio", least / rate)
    part.assume("optim.final_lr_ratio", 0.0, "the Trainer's schedules end at 0")
    if shape == "wsd":
        if (decay := part.whole(at + "num_decay_steps")) is not None and steps:
            part.becomes(at + "num_decay_steps", "optim.decay_share", decay / steps)
        part.skip(at + "num_stable_steps", "what warm-up and decay leave")
        if part.get(at + "decay_type") == "linear":
            part.same(at + "decay_type", "as here")
        else:
            part.warn("lr_scheduler_type: the decay is linear here; theirs is a cosine")
        part.same_if(at + "warmup_type", part.get(at + "warmup_type") == "linear")


def _every(part: Part, key: str, ours: str, strategy_key: str) -> None:
    """How often: by steps, or not at all."""
    strategy = (part.text(strategy_key) or "steps").lower()
    if strategy == "no":
        part.becomes(strategy_key, ours, 0)
        part.skip(key, f"{strategy_key} is no")
        return
    if strategy != "steps":
        part.refuse(strategy_key, f"goes by steps: set {ours}")
        part.skip(key, f"{strategy_key} is {shown(strategy)}")
        return
    part.same(strategy_key, "by steps")
    every = part.number(key)
    if every is not None and every != int(every):
        part.refuse(key, f"a share of all steps: set {ours}")
    elif every is not None:
        part.becomes(key, ours, int(every))


def _saving_and_looking(part: Part) -> None:
    when = "evaluation_strategy" if part.is_set("evaluation_strategy") else "eval_strategy"
    if part.is_set(when):
        _every(part, "eval_steps", "train.eval_every", when)
    else:
        part.assume("train.eval_every", 0, "the Trainer evaluates where eval_strategy says so")
        part.skip("eval_steps", "eval_strategy is no, its default")
    _every(part, "save_steps", "checkpoint.every", "save_strategy")
    if str(part.get("logging_strategy")).lower() == "no":
        part.skip("logging_strategy", "rank 0 has a progress bar or lines, and metrics.jsonl")
        part.skip("logging_steps", "logging_strategy is no")
    else:
        _every(part, "logging_steps", "log.every", "logging_strategy")
    part.sets_whole("save_total_limit", "checkpoint.keep")
    part.turns_on("load_best_model_at_end", "checkpoint.best", True, "kept in best/")
    part.turns_on("eval_on_start", "train.eval_at_start")
    names: Any = part.get("report_to")
    names = [names] if isinstance(names, str) else names
    if names in (["none"], []):
        part.becomes("report_to", "log.trackers", ["none"])
    elif names == ["all"]:
        part.same("report_to", "auto: files that are installed; services by name")
    elif isinstance(names, list) and all(isinstance(name, str) for name in names):
        part.becomes("report_to", "log.trackers", names)
    elif names is not None:
        part.refuse("report_to", f"expected names, found {shown(names)}")


def _rest(part: Part) -> None:
    for key, refusal in _SWITCHES.items():
        part.switch(key, refusal)
    for key, refusal in _REFUSED.items():
        for below in part.names(key):
            if part.get(below) in (None, False, "", [], {}):
                part.skip(below, "is not set")
            else:
                part.refuse(below, refusal)
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if part.turns_on(key, "shard.activation_checkpointing", "full"):
            part.turns_on(f"{key}_kwargs.offload", "shard.offload_activations")
        part.skip_rest(f"{key}_kwargs.offload", f"{key} is off")
        if (layers := part.whole(f"{key}_kwargs.every_n_layers")) is not None:
            part.same_if(f"{key}_kwargs.every_n_layers", layers == 1, "every unit, or none")
    for key in ("label_smoothing_factor", "neftune_noise_alpha"):
        if (value := part.number(key)) is not None:
            text = "the loss is the model's own; model.kind = module:function has yours"
            part.same_if(key, not value, text)
    part.turns_on("torch_compile", "shard.compile", True, "each unit's forward")
    part.turns_on("full_determinism", "run.reproducible", "same_world")
    for key in ("use_cpu", "no_cuda"):
        part.turns_on(key, "run.device", "cpu", off="auto: GPUs where torch sees them")
    if part.is_set("resume_from_checkpoint"):
        text = "auto: the newest of run.dir; shardwise checkpoint import reads those of others"
        part.same("resume_from_checkpoint", text)


def _sharding(part: Part, folder: Path) -> None:
    deepspeed, fsdp_on = part.get("deepspeed"), part.get("fsdp")
    words = fsdp_on.split() if isinstance(fsdp_on, str) else fsdp_on
    words = words if isinstance(words, list) else []
    is_fsdp = bool(fsdp_on) and str(fsdp_on).lower() != "false"
    if _is_there(part, "deepspeed"):
        translate_deepspeed(_below(part, "deepspeed", folder))
    elif not is_fsdp:
        part.assume(
            "shard.strategy", "no_shard", "neither fsdp nor deepspeed: every rank holds all"
        )
    if deepspeed in ("", {}):
        part.skip("deepspeed", "is not used")
    if part.is_set("fsdp_transformer_layer_cls_to_wrap") and is_fsdp:
        names = [part.get("fsdp_transformer_layer_cls_to_wrap")]
        part.becomes("fsdp_transformer_layer_cls_to_wrap", "shard.unit", names)
    for key in ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"):
        if not is_fsdp or part.get(key) in (0, None):
            part.skip(key, "is not set" if is_fsdp else "fsdp is off")
    if (bf16 := part.flag("bf16")) is not None:
        whole = is_fsdp or _is_there(part, "deepspeed")
        sums = "bfloat16" if whole else "float32"  # autocast leaves gradients in float32
        translate_compute(part, "bf16", "bfloat16" if bf16 else "float32", sums)
    if not is_fsdp:
        part.same("fsdp", "off")
        for key in part.names("fsdp_config"):
            part.skip(key, "fsdp is off")
        return
    strategy = next((word for word in words if word in _LEGACY[:5]), "")
    if _is_there(part, "fsdp_config"):
        fsdp.translate_fsdp(_below(part, "fsdp_config", folder), 2, 0, strategy)
    _legacy_fsdp(part, words, strategy)
    part.assume("shard.strategy", "full_shard", "FSDP's default")


def _legacy_fsdp(part: Part, words: list[Any], strategy: str) -> None:
    """The older texts, which say it all in one: `full_shard auto_wrap offload`."""
    for word in words:
        if word not in (*_LEGACY, "true", "True"):
            raise ConfigError(f"fsdp: {shown(word)} is none of {', '.join(_LEGACY)}")
    if not strategy:
        part.same("fsdp", "on")
    elif "shard.strategy" in part.account.settings:
        part.skip("fsdp", "fsdp_config says how, and wins")
    elif strategy.startswith("hybrid"):
        fsdp.hybrid(part, "fsdp", strategy, 0)
    else:
        part.becomes("fsdp", "shard.strategy", strategy, KEPT if "grad_op" in strategy else "")
    if "offload" in words:
        part.becomes("fsdp", "offload.parameters", "cpu", ON_HOST)


def _is_there(part: Part, key: str) -> bool:
    """A table of keys, or the name of a file with one."""
    return bool(part.names(key)) and part.account.leaves.get(part.path(key), key) not in _NOTHING


def _below(part: Part, key: str, folder: Path) -> Part:
    """The table at that key, or in the file that it names."""
    name = part.get(key)
    if not isinstance(name, str):
        return part.at(key)
    found = next((place for place in (folder / name, Path(name)) if place.exists()), None)
    if found is None:
        raise ConfigError(f"{part.name(key)}: {shown(name)}: no such file")
    part.option(key, "rows below", "read too")
    return part.account.add(read_document(found), (f"{found.name}:",))
