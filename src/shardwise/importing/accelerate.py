"""Accelerate's YAML: FSDP (both versions), DeepSpeed, plain data parallel, and what is not here.

Facts: Accelerate 1.15.0, `commands/config/config_args.py` (`ClusterConfig`, `SageMakerConfig`),
`commands/config/cluster.py`, `utils/dataclasses.py` (`DeepSpeedPlugin`, `DistributedType`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.importing.account import Part, shown
from shardwise.importing.common import NO_AXES, translate_compute
from shardwise.importing.deepspeed import offload_optimizer, offload_parameters, translate_deepspeed
from shardwise.importing.files import read_document
from shardwise.importing.fsdp import translate_fsdp

_TYPES = {
    "NO": "no_shard", "MULTI_GPU": "no_shard", "MULTI_CPU": "no_shard", "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed", "MEGATRON_LM": "", "XLA": "", "TPU": "", "MULTI_NPU": "",
    "MULTI_MLU": "", "MULTI_SDAA": "", "MULTI_MUSA": "", "MULTI_XPU": "", "MULTI_HPU": "",
    "MULTI_NEURON": "", "DATA_PARALLEL": "", "MODEL_PARALLEL": "",
}  # fmt: skip
_SKIPPED = {
    "belongs to the launcher of several hosts (docs/launching.md)": (
        "machine_rank main_process_ip main_process_port rdzv_backend same_network mpirun_config.* "
        "deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile "
        "deepspeed_config.deepspeed_exclusion_filter deepspeed_config.deepspeed_inclusion_filter"
    ),
    "is for TPUs": (
        "downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file "
        "commands"
    ),
    "ranks always compare what they send; waits are told": "debug",
    "the job is a command, no function of a script": "main_training_function",
    "threads are set by run.threads": "enable_cpu_affinity num_cpu_threads_per_process",
    "a model on meta is filled shard by shard": "deepspeed_config.zero3_init_flag",
    "with model.kind hf a run ends with the whole model in DIR/model": (
        "deepspeed_config.zero3_save_16bit_model"
    ),
    "units are compiled one by one": "dynamo_config.dynamo_use_regional_compilation",
    "is for several axes of the mesh": "deepspeed_config.seq_parallel_communication_data_type",
    "goes with offloading": (
        "deepspeed_config.offload_optimizer_nvme_path deepspeed_config.offload_param_nvme_path"
    ),
    "the machine is this one, or what the launcher knows": "compute_environment",
}
_REFUSED = {
    "megatron_lm_config": NO_AXES,
    "fp8_config": "computes in bfloat16 or float32",
    "deepspeed_config.deepspeed_moe_layer_cls_names": "units are whole: name them in shard.unit",
}
_SAGEMAKER = (
    "ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version "
    "transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file additional_args"
)
_AXES = "parallelism_config.parallelism_config_"
_OTHER_AXES = ("tp_size", "cp_size", "sp_size")
_OF_AXES = (
    "cp_comm_strategy", "cp_backend", "cp_seq_length_is_variable", "cp_attn_implementation",
    "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation",
)  # fmt: skip
_HANDLED = [
    *"""distributed_type mixed_precision num_processes num_machines use_cpu gpu_ids fp16
    dynamo_backend dynamo_config.dynamo_backend
    dynamo_config.dynamo_mode dynamo_config.dynamo_use_fullgraph dynamo_config.dynamo_use_dynamic
    deepspeed_config.deepspeed_config_file deepspeed_config.zero_stage
    deepspeed_config.offload_optimizer_device deepspeed_config.offload_param_device
    deepspeed_config.gradient_accumulation_steps deepspeed_config.gradient_clipping""".split(),
    *(f"{_AXES}{key}" for key in ("dp_replicate_size", "dp_shard_size", *_OTHER_AXES)),
    *(f"{_AXES}{key}" for key in _OF_AXES),
]  # fmt: skip
KEYS = {key.partition(".")[0] for key in [*_HANDLED, *" ".join(_SKIPPED.values()).split()]} | {
    "fsdp_config", "megatron_lm_config", "fp8_config", *_SAGEMAKER.split()
}  # fmt: skip


def translate_accelerate(part: Part, folder: Path) -> None:
    """Speaks for every leaf, those of a DeepSpeed file that it names included."""
    if part.get("compute_environment") == "AMAZON_SAGEMAKER":
        raise ConfigError(
            "compute_environment: AMAZON_SAGEMAKER starts jobs on Amazon's service; import the "
            "file of the LOCAL_MACHINE that it runs on"
        )
    hosts = part.whole("num_machines") or 1
    _ranks(part, hosts)
    kind = _kind(part)
    _mesh(part)
    _compiling(part)
    if kind == "fsdp" and part.names("fsdp_config"):
        translate_fsdp(part.at("fsdp_config"), 1, hosts)
    elif kind == "fsdp":
        part.assume("shard.strategy", "full_shard", "FSDP's default")
    elif kind == "deepspeed":
        _deepspeed(part, folder)
    _precision(part, kind)
    if "optim.lr" not in part.account.settings:
        part.warn("optimizer, schedule and batches are in the script: set [optim] and [train]")
    for section in ("fsdp", "deepspeed"):
        for key in part.names(f"{section}_config") if kind != section else ():
            part.skip(key, f"distributed_type is {shown(part.get('distributed_type'))}")
    for section, refusal in _REFUSED.items():
        for key in part.names(section):
            if part.get(key) not in ({}, None):
                part.refuse(key, refusal)
    part.finish(_SKIPPED, [*_HANDLED, *(f"{s}." for s in _REFUSED), "fsdp_config."])


def _kind(part: Part) -> str | None:
    kind = part.choice("distributed_type", _TYPES)
    if kind == "no_shard":
        part.becomes("distributed_type", "shard.strategy", kind, "every rank holds all, as DDP")
    elif kind in ("fsdp", "deepspeed"):
        part.same("distributed_type", f"{kind}_config says how")
    elif kind == "":
        why = NO_AXES if part.get("distributed_type") == "MEGATRON_LM" else "runs on CPU and CUDA"
        part.refuse("distributed_type", why)
    return kind


def _ranks(part: Part, hosts: int) -> None:
    account, ranks = part.account, part.whole("num_processes")
    if ranks is not None and ranks > 0:
        if account.ranks not in (None, ranks):
            part.warn(
                f"--ranks {account.ranks} is taken, not {part.name('num_processes')} = {ranks}"
            )
        account.ranks = account.ranks or ranks
        note = "of all hosts" if hosts > 1 else ""
        part.option("num_processes", f"--nproc {account.ranks}" if hosts == 1 else "torchrun", note)
    elif ranks is not None:
        part.skip("num_processes", "the launcher says how many")
    if hosts > 1:
        text = "torchrun --nnodes, with -m shardwise.train (docs/launching.md)"
        part.option("num_machines", f"--nnodes {hosts}", text)
    else:
        part.same("num_machines", "one host")
    part.turns_on("use_cpu", "run.device", "cpu", off="auto: GPUs where torch sees them")
    if part.is_set("gpu_ids"):
        if str(part.get("gpu_ids")) == "all":
            part.same("gpu_ids", "one rank for each GPU")
        else:
            part.option("gpu_ids", f"CUDA_VISIBLE_DEVICES={shown(part.get('gpu_ids'))}")


def _precision(part: Part, kind: str | None) -> None:
    words = {"no": "float32", "false": "float32", "fp32": "float32", "bf16": "bfloat16",
             "fp16": "float16", "fp8": "fp8"}  # fmt: skip
    dtype = part.choice("mixed_precision", words)
    if dtype == "fp8":
        part.refuse("mixed_precision", 'no float8; shard.param_dtype = "bfloat16"')
    elif kind in ("fsdp", "deepspeed"):
        translate_compute(part, "mixed_precision", dtype, dtype)
    else:  # autocast leaves weights and gradients in float32
        translate_compute(part, "mixed_precision", dtype, "float32")
    part.switch("fp16", "float16 needs a loss scaler; mixed_precision: bf16")


def _mesh(part: Part) -> None:
    at = _AXES
    for key in _OTHER_AXES:
        if (size := part.whole(at + key)) is None:
            continue
        if key == "tp_size" and size > 1:
            part.becomes(at + key, "mesh.tensor", size)
        else:
            part.same_if(at + key, size <= 1, NO_AXES)
    for key in _OF_AXES:
        part.skip(at + key, "goes with an axis that is not there")
    replicas, group = part.whole(at + "dp_replicate_size"), part.whole(at + "dp_shard_size")
    if replicas is not None and replicas > 1:
        part.becomes(at + "dp_replicate_size", "mesh.replicate", replicas)
        part.becomes(
            at + "dp_replicate_size", "shard.strategy", "hybrid_shard", "replicas of groups"
        )
    else:
        part.same(at + "dp_replicate_size", "one copy of the model")
    if group is not None and group > 1:
        part.becomes(at + "dp_shard_size", "mesh.shard", group)
    else:
        part.same(at + "dp_shard_size", "-1: all ranks that are left")
    ranks = (part.account.ranks or 0) // (part.whole(at + "tp_size") or 1)
    if ranks and replicas and group and replicas * group > 1 and ranks % (replicas * group):
        raise ConfigError(
            f"{part.name(at + 'dp_replicate_size')} x {part.name(at + 'dp_shard_size')} = "
            f"{replicas * group} does not divide {ranks} ranks (num_processes)"
        )


def _compiling(part: Part) -> None:
    for key in ("dynamo_backend", "dynamo_config.dynamo_backend"):
        backend = part.text(key)
        if backend is None:
            continue
        if backend.upper() == "INDUCTOR":
            part.becomes(key, "shard.compile", True, "each unit's forward")
        elif backend.upper() == "NO":
            part.same(key, "nothing is compiled")
        else:
            part.refuse(key, "units are compiled by inductor: shard.compile = true")
    for key in ("mode", "use_fullgraph", "use_dynamic"):
        name = f"dynamo_config.dynamo_{key}"
        if part.get(name) in (False, "default"):
            part.same(name, "torch.compile's default")
        elif part.is_set(name):
            part.refuse(name, "torch.compile's defaults are taken")


def _deepspeed(part: Part, folder: Path) -> None:
    below = part.at("deepspeed_config")
    stages = {"0": "no_shard", "1": "shard_optimizer", "2": "shard_grad_op", "3": "full_shard"}
    name = below.text("deepspeed_config_file")
    if name and name.lower() != "none":
        document = _named_file(below, name, folder)
        below.option("deepspeed_config_file", "rows below", "read too")
        translate_deepspeed(part.account.add(document, (f"{Path(name).name}:",)))
    elif not below.is_set("zero_stage"):
        below.assume("shard.strategy", "shard_grad_op", "Accelerate's default, stage 2")
    if (strategy := below.choice("zero_stage", stages)) is not None:
        below.becomes("zero_stage", "shard.strategy", strategy)
    for key, least in (("offload_optimizer_device", 1), ("offload_param_device", 3)):
        device = below.choice(key, {word: word for word in ("none", "cpu", "nvme")})
        if device in ("cpu", "nvme"):
            if key == "offload_optimizer_device":
                offload_optimizer(below, key, "offload_optimizer_nvme_path", device)
            else:
                offload_parameters(below, key, device)
            stage: Any = below.get("zero_stage")
            if isinstance(stage, int) and stage < least:
                stage_name = below.name("zero_stage")
                part.warn(f"{below.name(key)} needs stage {least} or more; {stage_name} is {stage}")
        elif device is not None:
            below.same(key, "stays on the device")
    below.sets_number("gradient_clipping", "train.grad_clip")
    if (steps := below.whole("gradient_accumulation_steps")) is not None:
        if steps == 1:
            below.same("gradient_accumulation_steps", "no accumulation")
        else:
            text = "global_batch is micro_batch x this x ranks; the script knows the micro-batch"
            below.refuse("gradient_accumulation_steps", text)


def _named_file(part: Part, name: str, folder: Path) -> dict[str, Any]:
    places = [folder / name, Path(name)]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise ConfigError(
            f"{part.name('deepspeed_config_file')}: {name}: no such file, neither beside this one "
            f"nor in the working directory"
        )
    return read_document(found)
