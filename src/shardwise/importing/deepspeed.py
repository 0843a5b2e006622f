"""DeepSpeed's JSON, also as the Trainer of transformers takes it (values "auto").

Facts: DeepSpeed's `docs/_pages/config-json.md` (www.deepspeed.ai/docs/config-json), and in
its `runtime/`: `config.py`, `constants.py`, `precision_config.py`, `zero/config.py`,
`zero/offload_config.py`, `lr_schedules.py`, as of 2026; what "auto" is taken from: transformers
5.24.0, `integrations/deepspeed.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.importing.account import Part
from shardwise.importing.common import (
    DTYPES,
    KEPT,
    NO_AXES,
    NO_FLOAT16,
    NO_OFFLOAD,
    NO_ZENFLOW,
    ON_HOST,
    optimizer_refusal,
    translate_batches,
    translate_compute,
    translate_replicas,
)
from shardwise.train.optimizer_keys import OPTIMIZERS

_STAGES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
_ZERO = "zero_optimization"
_NO_RATE = "DeepSpeed's default, lr is not set"

# What the Trainer fills in.
_AUTO = {
    "": "arguments",
    "train_batch_size": "per_device_train_batch_size x gradient_accumulation_steps x ranks",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm (train.grad_clip)",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16 (shard.param_dtype)",
    "bfloat16.enabled": "bf16 (shard.param_dtype)",
    "optimizer.params.lr": "learning_rate (optim.lr)",
    "optimizer.params.betas": "adam_beta1, adam_beta2 (optim.betas)",
    "optimizer.params.eps": "adam_epsilon (optim.eps)",
    "optimizer.params.weight_decay": "weight_decay (optim.weight_decay)",
    "scheduler.params.warmup_min_lr": "nothing: it is 0",
    "scheduler.params.warmup_max_lr": "learning_rate (optim.lr)",
    "scheduler.params.warmup_num_steps": "warmup_steps (optim.warmup_steps)",
    "scheduler.params.total_num_steps": "max_steps, or the epochs (train.steps)",
}

_IN_ZERO = {
    "a unit is gathered and reduced in one buffer; shard.unit says how large units are": (
        "allgather_bucket_size reduce_bucket_size contiguous_gradients allgather_partitions "
        "reduce_scatter stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params "
        "use_multi_rank_bucket_allreduce sub_group_size stage3_partition_stream_chunk_size "
        "round_robin_gradients parameter_alignment grad_hooks"
    ),
    "always: reductions and gathers overlap with computing on accelerators": "overlap_comm",
    "a unit is released after its use, and one is gathered ahead; see shard.gather_limit": (
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
        "prefetch_bucket_size max_live_parameters max_reuse_distance"
    ),
    "small parameters lie in their unit's buffer and cost no message of their own": (
        "stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "param_persistence_threshold model_persistence_threshold"
    ),
    "a whole unit is gathered, whatever its modules do inside": (
        "stage3_module_granularity_threshold leaf_module.*"
    ),
    "a trainable parameter that a rank did not use counts as zeros": "ignore_unused_parameters",
    "checkpoints load on any number of ranks, with float32 master weights": (
        "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint"
    ),
    "with model.kind hf a run ends with the whole model in DIR/model (checkpoint.export)": (
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "gather_16bit_weights_on_model_save"
    ),
    "concerns DeepSpeed's own workings": (
        "memory_efficient_linear override_module_apply log_trace_cache_warnings legacy_stage1 "
        "enable_sanity_checks compute_grad_norm save_muon_momentum_buffer_in_memory "
        "cpu_offload_use_pin_memory mics_hierarchical_params_gather"
    ),
    "feedback of what rounding lost is shard.error_feedback": "zeropp_loco_param.*",
}
_SKIPPED = {f: " ".join(f"{_ZERO}.{key}" for key in keys.split()) for f, keys in _IN_ZERO.items()}
_SKIPPED |= {
    "without float16 there is no loss to scale": (
        "fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis "
        "fp16.consecutive_hysteresis fp16.min_loss_scale fp16.auto_cast fp16.fused_mode"
    ),
    "gradients are reduced as soon as a unit has them; a loss that is no number ends the job": (
        "bf16.immediate_grad_update bf16.check_grad_overflow bfloat16.immediate_grad_update "
        "bfloat16.check_grad_overflow"
    ),
    "sums are taken in shard.reduce_dtype, whose range needs no scaling": (
        "prescale_gradients gradient_predivide_factor fp32_allreduce"
    ),
    "gradients are dense, whatever the model makes": "sparse_gradients",
    "all that torch.optim has may be sharded": (
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer optimizer.legacy_fusion"
    ),
    "the job chooses the kernel: fused where there is one": (
        "optimizer.params.torch_adam optimizer.params.fused optimizer.params.foreach "
        "optimizer.params.adam_w_mode optimizer.params.set_grad_none "
        "optimizer.params.fp32_optimizer_states"
    ),
    "a run goes on from its newest checkpoint by itself": ("scheduler.params.last_batch_iteration"),
    "times and memory of each step are in metrics.jsonl; log.profile_steps traces steps": (
        "wall_clock_breakdown memory_breakdown dump_state timers.* comms_logger.* log_level "
        "flops_profiler.module_depth flops_profiler.top_modules flops_profiler.detailed "
        "flops_profiler.output_file csv_monitor.*"
    ),
    "it lies in the run directory": "tensorboard.output_path tensorboard.job_name",
    "a checkpoint counts only when complete, and loads on any number of ranks": (
        "checkpoint.tag_validation checkpoint.load_universal checkpoint.parallel_write.* "
        "checkpoint.writer.* checkpoint.checkpoint_serialization"
    ),
    "files are read ahead and written behind in offload.chunk, with direct I/O": "aio.*",
    "every batch is whole: train.global_batch sequences": "dataloader_drop_last",
    "is the model's": "vocabulary_size",
    "only warns in DeepSpeed": "disable_allgather graph_harvesting",
    "is for several axes of the mesh": (
        "seq_parallel_comm_data_type seq_parallel_communication_data_type "
        "use_data_before_expert_parallelism"
    ),
    "concerns how DeepSpeed's checkpointing works": (
        "activation_checkpointing.contiguous_memory_optimization "
        "activation_checkpointing.number_checkpoints activation_checkpointing.profile "
        "activation_checkpointing.synchronize_checkpoint_boundary"
    ),
}
# Whole sections, unless they have enabled = false: why not.
_REFUSED = {
    "amp": "Apex is not used; shard.param_dtype = bfloat16",
    "autotuning": "nothing is tuned by itself; shardwise bench compares strategies",
    "elasticity": "global_batch stays as it is on any number of ranks; see --min-ranks",
    "compression_training": "models are not compressed",
    "weight_quantization": "models are not compressed",
    "quantize_training": "models are not compressed",
    "data_efficiency": "the order of data is random; data.source = module:function has its own",
    "curriculum_learning": "the order is random; data.source = module:function has its own",
    "progressive_layer_drop": "layers are dropped by your own model only",
    "eigenvalue": "serves quantized training, which is not there",
    "sparse_attention": "attention is the model's own (model.attention for kind hf)",
    "hybrid_engine": "no generation inside of training; shardwise generate",
    "pipeline": NO_AXES,
    "tensor_parallel": "matrices are split as the model's own plan says: mesh.tensor",
    "expert_parallel": NO_AXES,
    "nebula": "checkpoints go to run.dir; checkpoint.background writes beside training",
    "datastates": "checkpoints go to run.dir; checkpoint.background writes beside training",
    "compile": "shard.compile = true compiles each unit, without its communication",
    "comet": "there are tensorboard, wandb, mlflow and trackio (log.trackers)",
    "zenflow": NO_ZENFLOW,
    f"{_ZERO}.zenflow": NO_ZENFLOW,
}
_HANDLED = [
    *filter(None, _AUTO),
    *(f"{_ZERO}.{key}" for key in (
        "stage", "mics_shard_size", "zero_hpz_partition_size", "zero_quantized_weights",
        "zero_quantized_gradients", "zero_quantized_nontrainable_weights", "cpu_offload",
        "cpu_offload_param", "offload_optimizer.device", "offload_param.device",
        *(f"{where}.{key}" for where in ("offload_optimizer", "offload_param") for key in (
            "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init",
            "ratio", "pipeline_read", "pipeline_write", "super_offload", "convert_grad_on_cpu",
            "cpuadam_cores_perc")),
    )),
    *(f"{bf16}.{key}" for bf16 in ("bf16", "bfloat16") for key in (
        "bf16_master_weights_and_grads", "bf16_optimizer_states")),
    *(f"optimizer.params.{key}" for _, keys in OPTIMIZERS.values() for key in keys),
    *"""optimizer.type optimizer.params.max_grad_norm optimizer.params.bias_correction
    scheduler.type scheduler.params.warmup_type scheduler.params.warmup_min_ratio
    scheduler.params.cos_min_ratio communication_data_type data_types.grad_accum_dtype
    data_types.param_dtype data_types.buffer_dtype gradient_allreduce_op steps_per_print
    fp16.fp16_master_weights_and_grads torch_autocast.enabled torch_autocast.dtype
    torch_autocast.lower_precision_safe_modules flops_profiler.enabled flops_profiler.profile_step
    tensorboard.enabled wandb.enabled wandb.group wandb.team wandb.project
    checkpoint.use_node_local_storage activation_checkpointing.partition_activations
    activation_checkpointing.cpu_checkpointing sequence_parallel_size""".split(),
]  # fmt: skip
KEYS = {key.partition(".")[0] for key in [*_HANDLED, *" ".join(_SKIPPED.values()).split()]} | {
    *_REFUSED
}


def translate_deepspeed(part: Part) -> None:
    """Speaks for every leaf of DeepSpeed's table."""
    part = Part(part.account, part.prefix, {k: f"the trainer's {v}" for k, v in _AUTO.items()})
    by_trainer = any(str(part.get(key)).lower() == "auto" for key in part.names())
    translate_batches(
        part, "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    )
    _precision(part)
    _sharding(part)
    _offloading(part)
    part.sets_number("gradient_clipping", "train.grad_clip")
    if not part.is_set("gradient_clipping"):
        part.assume("train.grad_clip", 0.0, "DeepSpeed clips only when gradient_clipping is set")
    _optimizer(part)
    _schedule(part, by_trainer)
    _watching(part)
    _sections(part)
    part.finish(_SKIPPED, _HANDLED)


def _precision(part: Part) -> None:
    bf16_key = "bf16.enabled" if part.is_set("bf16.enabled") else "bfloat16.enabled"
    fp16, bf16 = part.flag("fp16.enabled"), part.flag(bf16_key)
    if fp16 and bf16:
        names = f"{part.name('fp16.enabled')} and {part.name(bf16_key)}"
        raise ConfigError(f"{names} are both true; a model computes in one of them")
    part.switch("fp16.enabled", NO_FLOAT16)
    part.switch("fp16.fp16_master_weights_and_grads", "master weights are float32")
    sums = {
        key: part.choice(key, DTYPES | {"none": "none"})
        for key in ("communication_data_type", "data_types.grad_accum_dtype")
    }
    is_wide = "float32" in sums.values()
    for key, dtype in sums.items():
        if dtype == "float16":
            part.refuse(key, NO_FLOAT16)
        elif dtype == "none":
            part.same(key, "the dtype of the model")
        elif dtype == "bfloat16" and is_wide:
            part.skip(key, "sums have one dtype, the wider of the two: float32")
        elif dtype is not None:
            part.becomes(key, "shard.reduce_dtype", dtype, "gradients are sent and added up in it")
    for key in ("data_types.param_dtype", "data_types.buffer_dtype"):
        dtype = part.choice(key, DTYPES)
        if dtype:
            part.refuse(key, "weights are float32, buffers as the model made them (model.dtype)")
    if bf16:
        translate_compute(part, bf16_key, "bfloat16", None if is_wide else "bfloat16")
    elif bf16 is not None:
        part.same(bf16_key, "float32")
    for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        text = 'float32 here; model.dtype = "bfloat16" of kind hf keeps weights and moments in it'
        part.switch(f"{bf16_key.partition('.')[0]}.{name}", text)
    _autocast(part)


def _autocast(part: Part) -> None:
    on, dtype = part.flag("torch_autocast.enabled"), part.choice("torch_autocast.dtype", DTYPES)
    if dtype == "float16":
        part.switch("torch_autocast.enabled", NO_FLOAT16)
    else:
        note = "whole forwards, where autocast goes operator by operator"
        part.turns_on("torch_autocast.enabled", "shard.param_dtype", "bfloat16", note)
    if dtype:
        part.skip("torch_autocast.dtype", "goes with torch_autocast.enabled" if on else "is off")
    part.skip("torch_autocast.lower_precision_safe_modules", "forwards have one dtype")


def _sharding(part: Part) -> None:
    if isinstance(part.get(_ZERO), bool):  # a form of before 2020
        stage = int(part.get(_ZERO))
        part.becomes(_ZERO, "shard.strategy", _STAGES[stage])
        return
    stage = part.whole(f"{_ZERO}.stage")
    if stage is not None and stage not in range(4):
        raise ConfigError(f"{part.name(f'{_ZERO}.stage')}: {stage} is no stage; there are 0 to 3")
    if not part.is_set(f"{_ZERO}.stage"):
        part.assume("shard.strategy", "no_shard", "DeepSpeed's stage is 0 where none is set")
    hybrid = _groups(part, stage)
    notes = {1: "gradients are whole until the last micro-batch", 2: KEPT}
    if stage == 3 and hybrid:
        part.becomes(f"{_ZERO}.stage", "shard.strategy", hybrid, "within groups")
    elif stage is not None:
        part.becomes(f"{_ZERO}.stage", "shard.strategy", _STAGES[stage], notes.get(stage, ""))
    for name, ours in (("weights", "shard.gather_wire"), ("gradients", "shard.reduce_wire")):
        key = f"{_ZERO}.zero_quantized_{name}"
        if stage == 3:
            part.turns_on(key, ours, "int8", "a scale for each block of 128")
        else:
            part.skip(key, "has an effect in stage 3 only")
    refusal = "frozen weights travel as they are; shard.gather_wire rounds what trains"
    part.switch(f"{_ZERO}.zero_quantized_nontrainable_weights", refusal)
    if part.choice("gradient_allreduce_op", {"mean": True, "sum": False}) is False:
        part.refuse("gradient_allreduce_op", "means over ranks; scale the loss by their number")
    part.same_if("gradient_allreduce_op", str(part.get("gradient_allreduce_op")).lower() == "mean")
    if (size := part.whole("sequence_parallel_size")) is not None:
        part.same_if("sequence_parallel_size", size <= 1, NO_AXES)


def _groups(part: Part, stage: int | None) -> str:
    """The strategy of groups of ranks, if the file has any."""
    for name, strategy, note in (
        (
            "mics_shard_size",
            "hybrid_shard",
            "weights, gradients and optimizer state in groups, which are replicas",
        ),
        (
            "zero_hpz_partition_size",
            "hybrid_full_optimizer",
            "weights in groups; gradients and optimizer state over all ranks",
        ),
    ):
        key = f"{_ZERO}.{name}"
        size = part.whole(key)
        if size is not None and size <= 1:
            part.same(key, "no groups")
        elif size is not None and stage not in (3, None):
            part.refuse(key, f"{part.name(f'{_ZERO}.stage')} is {stage}: groups need stage 3")
            part.warn(f"{part.name(key)} = {size} has no effect beside {_ZERO}.stage = {stage}")
        elif size is not None:
            translate_replicas(part, key, strategy, size, note)
    taken = part.account.settings.get("shard.strategy")
    return taken.value if taken is not None and taken.value.startswith("hybrid") else ""


def _offloading(part: Part) -> None:
    stage = part.get(f"{_ZERO}.stage")
    for where, old, least in (
        ("offload_optimizer", "cpu_offload", 1), ("offload_param", "cpu_offload_param", 3)
    ):  # fmt: skip
        key = f"{_ZERO}.{where}.device"
        device = part.choice(key, {name: name for name in ("none", "cpu", "nvme")})
        is_on = device in ("cpu", "nvme")
        if is_on and where == "offload_optimizer":
            offload_optimizer(part, key, f"{_ZERO}.{where}.nvme_path", device)
        elif is_on:
            offload_parameters(part, key, device)
        if is_on:
            if isinstance(stage, int) and stage < least:
                stage_name = part.name(f"{_ZERO}.stage")
                part.warn(
                    f"{part.name(key)} needs stage {least} or more, and {stage_name} is {stage}"
                )
        elif device == "none":
            part.same(key, "stays on the device")
        ratio = f"{_ZERO}.{where}.ratio"
        is_part = is_on and part.number(ratio) not in (None, 1)
        if is_part:
            part.refuse(ratio, "all of it goes there, or nothing")
        for below in part.names(f"{_ZERO}.{where}"):
            if below != key and below in _HANDLED and not (is_part and below == ratio):
                note = f"goes with {where}.device" if is_on else "nothing is offloaded"
                part.skip_rest(below, note)
        if old == "cpu_offload":
            part.turns_on(f"{_ZERO}.{old}", "offload.optimizer", "cpu", off="stays on the device")
        else:
            off = "stays on the device"
            part.turns_on(f"{_ZERO}.{old}", "offload.parameters", "cpu", ON_HOST, off=off)


def offload_parameters(part: Part, key: str, device: str) -> None:
    """Parameters go to `device`, cpu or nvme."""
    if device == "cpu":
        part.becomes(key, "offload.parameters", "cpu", ON_HOST)
    else:
        part.refuse(key, NO_OFFLOAD)


def offload_optimizer(part: Part, key: str, path_key: str, device: str) -> None:
    """The state of the optimizer goes to `device`, cpu or nvme."""
    folder = part.text(path_key)
    if device == "nvme" and not folder:
        part.refuse(key, f"needs {path_key}, a directory on a local disk (offload.directory)")
        return
    part.becomes(key, "offload.optimizer", device)
    part.becomes(key, "offload.step_on", "cpu", "DeepSpeed steps there")
    if device == "nvme":
        part.becomes(path_key, "offload.directory", folder, "working files only")


def _optimizer(part: Part) -> None:
    name = part.text("optimizer.type")
    if name is None:
        if not part.is_set("optimizer.type") and "optim.lr" not in part.account.settings:
            part.warn("no optimizer in the file: the script or the trainer makes it: set [optim]")
        return
    if refusal := optimizer_refusal(name):
        for key in part.names("optimizer"):
            part.refuse(key, refusal if key == "optimizer.type" else f"goes with {name}")
        return
    kind, note = name.lower(), ""
    decoupled = part.flag("optimizer.params.adam_w_mode")
    if kind == "adam" and decoupled is not False:
        kind, note = "adamw", "DeepSpeed's Adam decays as AdamW does (adam_w_mode)"
    part.becomes("optimizer.type", "optim.kind", kind, note)
    own = OPTIMIZERS[kind][1]
    for key in part.names("optimizer.params"):
        _optimizer_key(part, key, own)
    at = "optimizer.params."
    for key, value in {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}.items():
        if key in (*own, "lr") and not part.is_set(at + key):
            value = list(value) if isinstance(value, tuple) else value
            part.assume(f"optim.{key}", value, f"DeepSpeed's default, {key} is not set")
    part.assume("optim.no_decay", [], "DeepSpeed lets all parameters decay")


def _optimizer_key(part: Part, key: str, own: Mapping[str, Any]) -> None:
    name = key.removeprefix("optimizer.params.")
    if name in ("lr", "max_grad_norm"):
        part.sets_number(key, "optim.lr" if name == "lr" else "train.grad_clip")
    elif name in own and isinstance(own[name], tuple):
        if (values := part.numbers(key)) is not None:
            part.becomes(key, f"optim.{name}", values)
    elif name in own and isinstance(own[name], bool):
        if (value := part.flag(key)) is not None:
            part.becomes(key, f"optim.{name}", value)
    elif name in own:
        part.sets_number(key, f"optim.{name}")
    elif name == "bias_correction" and (value := part.flag(key)) is not None:
        part.same_if(key, value, "torch's Adam always corrects")


def _schedule(part: Part, by_trainer: bool) -> None:
    at = "scheduler.params."
    name = part.text("scheduler.type")
    shapes = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
    if name is None:
        if not part.is_set("scheduler.type") and part.is_set("optimizer.type") and not by_trainer:
            why = "no scheduler: the rate is constant"
            part.assume("optim.schedule", "constant", why)
            part.assume("optim.warmup_steps", 0, why)
        return
    shape = shapes.get(name.lower())
    if shape is None:
        for key in part.names("scheduler"):
            own = "schedules here: cosine, linear, constant, wsd, each with a linear warm-up"
            part.refuse(key, own if key == "scheduler.type" else f"goes with {name}")
        return
    part.becomes("scheduler.type", "optim.schedule", shape)
    if shape == "linear":
        part.becomes("scheduler.type", "optim.final_lr_ratio", 0.0, "down to 0")
    _highest_rate(part, shape)
    part.sets_whole(at + "total_num_steps", "train.steps")
    if shape == "cosine":
        part.sets_number(at + "cos_min_ratio", "optim.final_lr_ratio")
        part.assume("optim.final_lr_ratio", 0.0001, "DeepSpeed's default, no cos_min_ratio")
    _warm_up(part, at)


def _warm_up(part: Part, at: str) -> None:
    part.sets_whole(at + "warmup_num_steps", "optim.warmup_steps")
    if not part.is_set(at + "warmup_num_steps"):
        part.assume("optim.warmup_steps", 1000, "DeepSpeed's default, no warmup_num_steps")
    for key in (at + "warmup_min_lr", at + "warmup_min_ratio"):
        if (least := part.number(key)) is not None:
            part.same_if(key, least == 0, "the warm-up begins at 0")
    kind = part.choice(at + "warmup_type", {"linear": "linear", "log": "log"})
    if kind is not None:
        part.same_if(at + "warmup_type", kind == "linear", "the warm-up is linear")
    elif not part.is_set(at + "warmup_type"):
        part.warn(
            f"{part.name('scheduler.type')}: DeepSpeed warms up along a logarithm unless "
            "warmup_type is linear; here it is linear"
        )


def _highest_rate(part: Part, shape: str) -> None:
    """The scheduler's rate wins over the optimizer's in DeepSpeed, which sets it at every step."""
    key, below = "scheduler.params.warmup_max_lr", "optimizer.params.lr"
    if part.is_set("optimizer.type") and optimizer_refusal(str(part.get("optimizer.type"))):
        part.refuse(key, "goes with the optimizer; set optim.lr")
        return
    rate = part.number(key)
    if rate is None and shape == "linear" and not part.is_set(key) and part.is_set(below):
        part.warn(f"{part.name(key)} is not set: DeepSpeed takes 0.001 then, not {below}")
    if rate is None:
        return
    given = part.account.settings.get("optim.lr")
    if given is not None and given.value != rate and given.origin in (part.name(below), _NO_RATE):
        del part.account.settings["optim.lr"]
        if part.is_set(below):
            part.skip(below, f"the scheduler's warmup_max_lr = {rate} wins in DeepSpeed too")
            part.warn(f"{part.name(below)} and {part.name(key)} disagree; the latter is taken")
    part.becomes(key, "optim.lr", float(rate))


def _watching(part: Part) -> None:
    if part.get("steps_per_print") == float("inf"):
        part.skip("steps_per_print", "no lines; log.every says how often")
    else:
        part.sets_whole("steps_per_print", "log.every")
    step = part.whole("flops_profiler.profile_step")
    note = "torch.profiler traces that step; mfu is shown where the device's peak is known"
    on = part.turns_on("flops_profiler.enabled", "log.profile_steps", [step or 1], note)
    if step is not None:
        part.skip(
            "flops_profiler.profile_step", "log.profile_steps" if on else "the profiler is off"
        )
    if (on := part.flag("tensorboard.enabled")) is not None:
        note = "log.trackers auto: where it is installed" if on else "log.trackers leaves it out"
        part.same("tensorboard.enabled", note)
    on = part.turns_on("wandb.enabled", "log.trackers", ["wandb"])
    for key, variable in (("group", "RUN_GROUP"), ("team", "ENTITY"), ("project", "PROJECT")):
        if not on:
            part.skip(f"wandb.{key}", "wandb is off")
        else:
            part.refuse(f"wandb.{key}", f"is set by the environment: WANDB_{variable}")
    part.switch(
        "checkpoint.use_node_local_storage", "all hosts share run.dir; see checkpoint.memory_every"
    )
    part.switch("activation_checkpointing.partition_activations", NO_AXES)
    part.switch(
        "activation_checkpointing.cpu_checkpointing",
        'shard.activation_checkpointing = "full" with shard.offload_activations = true, if the '
        "script recomputes: the file does not say",
    )
    if part.names("activation_checkpointing"):
        part.warn(
            f"{part.name('activation_checkpointing')} says how, not whether: if the script uses "
            'DeepSpeed\'s recomputation, set shard.activation_checkpointing = "full"'
        )


def _sections(part: Part) -> None:
    if (size := part.whole("tensor_parallel.autotp_size")) is not None and size > 1:
        part.becomes("tensor_parallel.autotp_size", "mesh.tensor", size)
    for section, refusal in _REFUSED.items():
        keys = part.names(section)
        off = part.get(f"{section}.enabled") is False or not any(map(part.get, keys))
        if section == "tensor_parallel" and part.get(f"{section}.autotp_size") == 1:
            off = True
        for key in keys:
            if part.path(key) not in part.account.rows and off:
                part.skip(key, f"{section} is off")
            elif part.path(key) not in part.account.rows:
                part.refuse(key, refusal)
