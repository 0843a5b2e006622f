"""The configuration of a training job: frozen data and its defaults.

One dataclass per section; the text under a key is its help. Only keys that have an effect exist.
What must hold between keys is `config_checks.py`'s work, reading files and overrides is
`config_file.py`'s; nothing here imports torch, so that `--help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from shardwise.comm.choose import is_known, unknown_transport
from shardwise.units import full_name, parse_size

DType = Literal["float32", "bfloat16"]

WireName = Literal["exact", "bf16", "int8"]

HYBRID = ("hybrid_shard", "hybrid_full_optimizer")  # those that take replicas
StrategyName = Literal[
    "auto", "no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard",
    "hybrid_full_optimizer",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunConfig:
    dir: str = "runs/default"
    """Where the run writes: config.toml, metrics.jsonl, checkpoints/. Starting again continues."""
    seed: int = 0
    """Seeds weights, data order and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs where torch sees them, else CPU."""
    threads: int = 0
    """CPU threads of each rank; 0: OMP_NUM_THREADS, or cores / ranks (1 under any_world)."""
    numa: Literal["auto", "off"] = "auto"
    """auto: where the host has several memory nodes, a rank keeps to the cores of its GPU's."""
    reproducible: Literal["off", "same_world", "any_world"] = "off"
    """The same numbers to the last bit: on every run with the same ranks, or on any number."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    kind: str = "decoder"
    """decoder, hf (a model of transformers), or module:function (other keys go to it)."""
    dim: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Query heads; dim / heads must be even."""
    kv_heads: int = 0
    """Key/value heads of grouped-query attention; 0: as many as heads."""
    hidden: int = 0
    """Width of the SwiGLU layer; 0: 8/3 dim, rounded up to a multiple of 64."""
    vocab_size: int = 256
    """256 for bytes; set it for token files."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output matrix too."""

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def num_hidden(self) -> int:
        return self.hidden or -(-8 * self.dim // 3 // 64) * 64


@dataclass(frozen=True, slots=True)
class HFModelConfig:
    kind: str = "hf"
    """hf: a causal language model of transformers."""
    path: str = ""
    """Its directory (config.json, safetensors), or a config.json alone for new weights."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What weights are kept in. auto: float32; what the directory has where [lora] freezes them."""
    attention: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"
    """auto: the first of these that is installed and that the model supports."""


@dataclass(frozen=True, slots=True)
class CustomModelConfig:
    """A user's factory, `module:function`; `options` are the other keys of [model], passed to
    it."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    rank: int = 0
    """Rank of the adapters that are trained in place of weights; 0: none. For model.kind hf."""
    alpha: float = 16.0
    """What adapters add is scaled by alpha / rank."""
    dropout: float = 0.0
    """Of what goes into the adapters."""
    targets: str | tuple[str, ...] = "all-linear"
    """Which get one: all-linear, or names and patterns of names ("q_proj", "*.mlp.*_proj")."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    source: str | tuple[str, ...] = "stdlib"
    """stdlib (Python's own sources), paths of files or folders, module:function."""
    format: Literal["tokens", "text", "chat", "instruction"] = "tokens"
    """tokens: text as bytes, or token files (.bin, .npy); the others: records, by a tokenizer."""
    seq_len: int = 256
    """Tokens per sequence."""
    held_out: float = 0.02
    """Share of the data kept for evaluation, never trained on; 0: none (not for tokens)."""
    token_dtype: Literal["uint16", "uint8"] = "uint16"
    """What .bin files hold."""
    fields: tuple[str, ...] = ()
    """Names of fields that differ: "messages=conversations", "role=from", "output=answer"."""
    tokenizer: str = ""
    """Directory of the tokenizer; if left out, that of the model."""
    chat_template: str = ""
    """File with a jinja template for chats; if left out, the tokenizer's own."""
    system: Literal["keep", "merge", "drop"] = "keep"
    """The system's message: as it is, put before the first of the user, or left out."""
    overlong: Literal["auto", "truncate", "drop", "split", "refuse"] = "auto"
    """Samples above seq_len; auto: texts are split, chats truncated."""
    invalid: Literal["refuse", "skip"] = "refuse"
    """Records that cannot be used: an error that names the first, or left out and counted."""
    packing: bool = True
    """Several documents a sequence; none sees another."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    steps: int = 120
    """Optimizer steps of the whole run, the resumed part included."""
    global_batch: int = 32
    """Sequences per optimizer step, over all ranks; a multiple of ranks * micro_batch."""
    micro_batch: int = 16
    """Sequences per forward on one rank; if left out, at most 16: what fits global_batch."""
    grad_clip: float = 1.0
    """Limit of the global gradient norm; 0: none."""
    chunked_loss: Literal["auto", "on", "off"] = "auto"
    """Never hold all logits of a transformers model; auto: where they outweigh what that needs."""
    eval_every: int = 40
    """Steps between evaluations on the held-out part (and after the last step); 0: never."""
    eval_at_start: bool = False
    """Evaluates before the first step too, as step 0: what training has gained is then known."""
    eval_samples: int = 128
    """Held-out sequences per evaluation, evenly spread over the held-out part."""
    patience: int = 0
    """Evaluations without a lower val_loss after which the run ends; 0: it never ends early."""


@dataclass(frozen=True, slots=True)
class OptimConfig:
    kind: str = "adamw"
    """One of torch.optim: adamw, adam, sgd, ...; its own keys stand beside (momentum = 0.9)."""
    lr: float = 3e-3
    """Highest learning rate, reached after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moment estimates; torch's default for other kinds than adamw."""
    weight_decay: float = 0.1
    """Of adamw decoupled from the gradient; torch's default for other kinds."""
    no_decay: tuple[str, ...] = ("bias", "norm")
    """What does not decay: bias, norm (scales), embedding, or patterns of parameters' names."""
    adamw: tuple[str, ...] = ("embedding", "head")
    """muon: matrices that AdamW steps, as all that is no matrix: these, or patterns of names."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up: down to final_lr_ratio * lr, constant, or constant and then down (wsd)."""
    final_lr_ratio: float = 0.1
    """Where cosine, linear and wsd end, as a share of lr."""
    decay_share: float = 0.2
    """wsd: share of all steps, at the end, in which the rate falls."""
    state_dtype: Literal["param", "bfloat16"] = "param"
    """What it keeps of a parameter: in the parameter's dtype, or half that where its kernel can."""
    in_backward: bool = False
    """Step each unit in the backward and free its gradients; needs train.grad_clip = 0."""


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    parameters: Literal["none", "cpu"] = "none"
    """cpu: shards, gradients and state lie in host memory and come to the device for use."""
    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where the optimizer's state lies: on the device, in host memory, in files of `directory`."""
    directory: str = ""
    """For nvme, on a local disk: a working file of each rank, of the size of its state."""
    chunk: str | int = "16MiB"
    """State that is brought at once; for nvme five such are in memory."""
    step_on: Literal["device", "cpu"] = "device"
    """Where the optimizer computes."""
    in_background: bool = False
    """Units step while the next forward runs, each before it is gathered."""


@dataclass(frozen=True, slots=True)
class OwnOptimConfig(OptimConfig):
    """With keys that only this kind of optimizer has (`optimizer_keys.py`)."""

    own: dict[str, Any] = field(default_factory=dict)


def own_keys(optim: OptimConfig) -> dict[str, Any]:
    return optim.own if isinstance(optim, OwnOptimConfig) else {}


@dataclass(frozen=True, slots=True)
class ShardConfig:
    strategy: StrategyName = "auto"
    """auto: full_shard (hybrid_shard if mesh.replicate > 1). Or zero1-3, fsdp, ddp, hsdp, hfsdp."""
    unit: str | int | tuple[str, ...] = "auto"
    """What is gathered together: auto, class names or name patterns, or a size in bytes."""
    transport: str = "auto"
    """How shards move between ranks: auto, c10d, shared_memory, or one that was registered."""
    param_dtype: DType = "float32"
    """What forward and backward compute in; master weights stay float32. Or bf16, fp32."""
    reduce_dtype: DType = "float32"
    """What gradients are summed in."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """full: recompute each unit's forward in backward; selective: all but matrix products."""
    offload_activations: bool = False
    """Let what units save for backward wait in host memory; accelerators only."""
    gather_limit: str | int = 0
    """Bytes (or "256MiB") of gathered parameters that prefetching may reach; 0: one unit ahead."""
    overrides: tuple[str, ...] = ()
    """Another strategy or transport for units by name: "blocks.0=shard_grad_op", "head=:c10d"."""
    compile: bool = False
    """torch.compile the forward of each unit."""
    gather_wire: WireName = "exact"
    """How weights travel to where they are used; what is kept and saved stays exact."""
    reduce_wire: WireName = "exact"
    """How gradients travel to where they are added up, in float32; between replicas on hybrid."""
    wire_block: int = 128
    """Elements that share a scale of int8."""
    error_feedback: bool = False
    """Add what reduce_wire has rounded away to the next gradients."""
    host_ranks: int = 0
    """Ranks of each host: above 1, full_shard adds up inside hosts before anything leaves them."""


@dataclass(frozen=True, slots=True)
class MeshConfig:
    replicate: int = 1
    """Replicas of the sharded model (hybrid_shard, hybrid_full_optimizer)."""
    shard: int = -1
    """Ranks that share one copy of the model; -1: all that are left."""
    tensor: int = 1
    """Neighbouring ranks that split each matrix (tensor parallelism); 1: none."""


@dataclass(frozen=True, slots=True)
class ReplicasConfig:
    coordinator: str = ""
    """host:port of `shardwise replicas`, through which this job meets others; empty: alone."""
    name: str = ""
    """Of this replica among them, the same after a restart; empty: host name and run.dir."""
    wire: Literal["exact", "int8"] = "exact"
    """How what was learnt travels: float32, or a byte an element."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    every: int = 20
    """Steps between checkpoints; the last step and SIGTERM save too. 0: only these."""
    memory_every: int = 0
    """Steps between copies in memory, from which a restart goes on without the disk; 0: none."""
    keep: int = 2
    """How many complete checkpoints stay; 0: all."""
    best: bool = False
    """Keep the one of the lowest val_loss too."""
    resume: str = "auto"
    """auto: continue the run directory; off: refuse one with checkpoints; or the path of one."""
    background: bool = False
    """Write in a thread while training goes on; costs a copy of this rank's shards in memory."""
    rehearsal: bool = True
    """After the first step of a start, save once for trial: permissions and space show at once."""
    export: bool = True
    """At the end of the run write DIR/model, as transformers loads it. For model.kind hf."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    every: int = 10
    """Steps between console lines where there is no progress bar."""
    trackers: tuple[str, ...] = ("auto",)
    """tensorboard, figure (loss.png), wandb, mlflow, trackio; auto: the first two; none."""
    samples: tuple[str, ...] = ()
    """Prompts that the model continues at each evaluation, likeliest tokens first; for kind hf."""
    sample_tokens: int = 32
    """Tokens of each continuation."""
    profile_steps: tuple[int, ...] = ()
    """Steps that torch.profiler traces, into profile/."""


@dataclass(frozen=True, slots=True)
class Config:
    run: RunConfig = RunConfig()
    model: DecoderConfig | HFModelConfig | CustomModelConfig = DecoderConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    offload: OffloadConfig = OffloadConfig()
    shard: ShardConfig = ShardConfig()
    mesh: MeshConfig = MeshConfig()
    replicas: ReplicasConfig = ReplicasConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


SECTIONS: dict[str, type] = {f.name: type(f.default) for f in fields(Config)}
MODEL_KINDS: dict[str, type] = {"decoder": DecoderConfig, "hf": HFModelConfig}  # by name


def sections_of(kind: str) -> dict[str, type]:
    """The sections, with that of the model as its kind has it."""
    return SECTIONS | {"model": MODEL_KINDS.get(kind, DecoderConfig)}


def is_factory(text: object) -> bool:
    """`package.module:function`, as `model.kind` and `data.source` take it."""
    if not isinstance(text, str):
        return False
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), name])


def gather_limit(config: Config) -> int | None:
    """`shard.gather_limit` in bytes; None when it is no size."""
    limit = config.shard.gather_limit
    return limit if isinstance(limit, int) else parse_size(limit)


def chunk_bytes(config: Config) -> int | None:
    """`offload.chunk` in bytes; None when it is no size."""
    chunk = config.offload.chunk
    return chunk if isinstance(chunk, int) else parse_size(chunk)


def parse_override(entry: str) -> tuple[str, dict[str, str]]:
    """`PATTERN=STRATEGY`, `PATTERN=:TRANSPORT` or `PATTERN=STRATEGY:TRANSPORT`."""
    pattern, equals, value = entry.partition("=")
    strategy, _, transport = (full_name(part) for part in value.partition(":"))
    if not equals or not value.strip(":"):
        raise ValueError(f"{entry!r}: expected PATTERN=STRATEGY[:TRANSPORT]")
    known = get_args(StrategyName)[1:]
    if strategy and strategy not in known:
        raise ValueError(f"{entry!r}: unknown strategy; choose one of {', '.join(known)}")
    if transport and not is_known(transport):
        raise ValueError(f"{entry!r}: {unknown_transport(transport)}")
    chosen = {"strategy": strategy, "transport": transport}
    return pattern, {key: text for key, text in chosen.items() if text}


def resolved_strategy(config: Config) -> str:
    """The strategy that `auto` stands for."""
    if config.shard.strategy != "auto":
        return config.shard.strategy
    return "hybrid_shard" if config.mesh.replicate > 1 else "full_shard"


def mesh_shape(config: Config, world_size: int) -> tuple[int, int]:
    """(replicate, shard) sizes on that many ranks, -1 resolved; see `world_problems`."""
    shard, data = config.mesh.shard, world_size // config.mesh.tensor
    return config.mesh.replicate, data // config.mesh.replicate if shard == -1 else shard
