"""The arguments of FSDP that Accelerate and the Trainer of transformers have in common.

Facts: Accelerate 1.15.0 (`FullyShardedDataParallelPlugin`, `commands/config/cluster.py`), and
transformers 5.24.0 (`TrainingArguments.fsdp_config`); torch's `ShardingStrategy`. The names here
are without the prefix `fsdp_`.
"""

from __future__ import annotations

from shardwise.importing.account import Part
from shardwise.importing.common import KEPT, ON_HOST, translate_replicas

_STRATEGIES = {
    name: name.lower().removeprefix("_")
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
} | {"_HYBRID_SHARD_ZERO2": "hybrid_shard_zero2"}
_NUMBERED = {str(number): name for number, name in enumerate(list(_STRATEGIES.values())[:5], 1)}
_RESHARD = {"true": "full_shard", "false": "shard_grad_op"}
_POLICIES = {"TRANSFORMER_BASED_WRAP": "names", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}

_SKIPPED = {
    "gathers run one unit ahead on accelerators; shard.gather_limit bounds their bytes": (
        "backward_prefetch backward_prefetch_policy forward_prefetch limit_all_gathers"
    ),
    "checkpoints are sharded, and load on any number of ranks; DIR/model is whole": (
        "state_dict_type state_dict_config optim_state_dict_config"
    ),
    "is for TPUs": "xla_fsdp_settings*",
}
_HANDLED = (
    "version sharding_strategy reshard_after_forward auto_wrap_policy min_num_params "
    "transformer_layer_cls_to_wrap offload_params cpu_offload use_orig_params "
    "cpu_ram_efficient_loading sync_module_states activation_checkpointing "
    "activation_checkpointing_offload ignored_modules mixed_precision_policy xla xla_fsdp_v2 "
    "xla_fsdp_grad_ckpt"
).split()
KEYS = {*_HANDLED, *" ".join(_SKIPPED.values()).replace("*", "").split()}


class Prefixed(Part):
    """A table whose keys may or may not begin with `fsdp_`."""

    def path(self, key: str) -> tuple[str, ...]:
        plain = super().path(key)
        long = (*plain[:-1], f"fsdp_{plain[-1]}")
        return long if len(plain) == len(self.prefix) + 1 and long in self.account.leaves else plain


def translate_fsdp(part: Part, default_version: int, hosts: int, strategy: str = "") -> None:
    """`hosts`: over how many the job runs, by which HYBRID_SHARD makes its groups. `strategy`: of
    the Trainer's older argument `fsdp`, which a key here wins over."""
    part = Prefixed(part.account, part.prefix, part.auto)
    version = part.whole("version") or default_version
    part.same("version", "both versions are sharded alike here, parameter by parameter")
    _strategy(part, version, hosts, strategy)
    _units(part)
    for key in ("offload_params", "cpu_offload"):
        off = "shards stay on the device"
        part.turns_on(key, "offload.parameters", "cpu", ON_HOST, off=off)
    part.same("use_orig_params", "optimizers always see the parameters one by one")
    part.same("cpu_ram_efficient_loading", "each rank reads its own rows (model.kind hf)")
    part.same("sync_module_states", "weights that differ between ranks are found and made equal")
    note = "each unit's forward is computed again"
    part.turns_on("activation_checkpointing", "shard.activation_checkpointing", "full", note)
    key = "activation_checkpointing_offload"
    part.turns_on(key, "shard.offload_activations", True, "accelerators only")
    if part.is_set("ignored_modules"):
        part.refuse(
            "ignored_modules", "the job shards all; fully_shard(ignored_params=...) does not"
        )
    for key in part.names("mixed_precision_policy"):
        part.refuse(key, "set shard.param_dtype and shard.reduce_dtype")
    for key in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"):
        part.switch(key, "TPUs are not supported")
    prefixed = {reason: f"{keys} {_with_prefix(keys)}" for reason, keys in _SKIPPED.items()}
    part.finish(prefixed, [*_HANDLED, *_with_prefix(" ".join(_HANDLED)).split()])


def _with_prefix(keys: str) -> str:
    return " ".join(f"fsdp_{key}" for key in keys.split())


def _strategy(part: Part, version: int, hosts: int, legacy: str) -> None:
    both = _STRATEGIES | _NUMBERED | _RESHARD
    key, name = "reshard_after_forward", None
    if part.is_set("sharding_strategy"):
        key, name = "sharding_strategy", part.choice("sharding_strategy", both)
        other = part.choice("reshard_after_forward", both)
        if other is not None:
            part.skip("reshard_after_forward", f"{part.name(key)} wins")
            if version == 2:
                part.warn(
                    f"{part.name(key)} and {part.name('reshard_after_forward')} are both there: "
                    f"the first is taken"
                )
    else:
        name = part.choice("reshard_after_forward", both)
    if name is None:
        if not legacy and not part.is_set(key):
            part.assume("shard.strategy", "full_shard", "FSDP's default")
        return
    if "mesh.replicate" in part.account.settings and name in ("full_shard", "shard_grad_op"):
        part.becomes(key, "shard.strategy", "hybrid_shard", "within groups, which are replicas")
    elif name == "full_shard":
        part.becomes(key, "shard.strategy", name)
    elif name == "shard_grad_op":
        part.becomes(key, "shard.strategy", name, KEPT)
    elif name == "no_shard":
        part.becomes(key, "shard.strategy", name, "every rank holds all")
    else:
        hybrid(part, key, name, hosts)


def hybrid(part: Part, key: str, name: str, hosts: int) -> None:
    """Sharded within a host, and replicas on the others; 0 hosts: the file does not say."""
    ranks = part.account.ranks
    if hosts == 1:
        part.becomes(key, "shard.strategy", "full_shard", "one host holds one copy: no replicas")
    elif not hosts or not ranks or ranks % hosts:
        said = f"{ranks or '?'} ranks on {hosts or '?'} hosts"
        part.refuse(key, f'shard.strategy = "hybrid_shard", mesh.replicate = hosts; it says {said}')
    else:
        note = "sharded within a host, replicas between hosts"
        if name.endswith("zero2"):
            note += "; gathered again in the backward: less memory, the same numbers"
        translate_replicas(part, key, "hybrid_shard", ranks // hosts, note)


def _units(part: Part) -> None:
    kind = part.choice("auto_wrap_policy", _POLICIES)
    names = part.get("transformer_layer_cls_to_wrap")
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    good = isinstance(names, list) and names and all(isinstance(n, str) and n for n in names)
    least = part.whole("min_num_params")
    if part.is_set("transformer_layer_cls_to_wrap"):
        if not good:
            part.refuse("transformer_layer_cls_to_wrap", "expected names of classes")
        elif kind in (None, "names"):
            part.becomes("transformer_layer_cls_to_wrap", "shard.unit", names)
        else:
            part.skip("transformer_layer_cls_to_wrap", "the wrap policy goes by something else")
    if least is not None:
        if kind == "size" and least > 0:
            note = "at most so many float32 parameters a unit; torch's have at least as many"
            part.becomes("min_num_params", "shard.unit", 4 * least, note)
        else:
            part.skip("min_num_params", "is for SIZE_BASED_WRAP with a number above 0")
    if kind == "none":
        part.becomes("auto_wrap_policy", "shard.unit", [], "one unit: all is gathered at once")
    elif kind is not None:
        said = "shard.unit" in part.account.settings
        part.same("auto_wrap_policy", "shard.unit says which" if said else "auto: repeated blocks")
