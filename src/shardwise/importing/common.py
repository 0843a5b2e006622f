"""What the formats share: batches from parts of them, a mesh with replicas, dtypes, optimizers."""

from __future__ import annotations

from shardwise.errors import ConfigError
from shardwise.importing.account import Part, shown
from shardwise.train.optimizer_keys import OPTIMIZERS, REFUSED
from shardwise.units import full_name

DTYPES = {
    name: full_name(name.removeprefix("torch."))
    for short in ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
    for name in (short, f"torch.{short}")
}
NO_FLOAT16 = (
    'float16 needs a loss scaler, which the job does not have; shard.param_dtype = "bfloat16" has '
    "the same size and the range of float32"
)
NO_OFFLOAD = (
    'parameters go to host memory at most (offload.parameters = "cpu"), files are for the '
    'optimizer\'s state (offload.optimizer = "nvme")'
)
NO_ZENFLOW = (
    "no step waits for a part of the gradients; offload.in_background = true steps all of them "
    "beside the next forward, to the same bits"
)
ON_HOST = "shards, gradients and the optimizer's state; accelerators only"
NO_AXES = (
    "the job has no sequence, pipeline or expert axis (mesh.tensor splits matrices); fully_shard "
    "takes DTensors of other mesh dims in a script (docs/parallelism.md)"
)
KEPT = "gathered copies are kept until the optimizer writes, so accumulation gathers once a step"


def translate_batches(
    part: Part, total_key: str, micro_key: str, steps_key: str, default_micro: int | None = None
) -> None:
    """Samples per step = samples per forward of a rank x forwards x ranks. The number of ranks
    follows where the other three are known."""
    total, micro, steps = part.whole(total_key), part.whole(micro_key), part.whole(steps_key)
    for key, value in ((total_key, total), (micro_key, micro), (steps_key, steps)):
        if value is not None and value < 1:
            raise ConfigError(f"{part.name(key)}: {value} is not above 0")
    if micro is None and default_micro and not part.is_set(micro_key):
        micro = default_micro
        part.assume("train.micro_batch", micro, f"the default of {micro_key}")
    if total and micro:
        _check_total(part, total, micro, steps, (total_key, micro_key, steps_key))
        if steps and part.account.ranks is None:
            part.account.ranks = total // (micro * steps)
            part.warn(
                f"{part.account.ranks} ranks, since {part.name(total_key)} = {total} is "
                f"{micro_key} {micro} x {steps_key} {steps} x ranks"
            )
    ranks = part.account.ranks
    if total and ranks and not micro:
        forwards = steps or 1
        if total % (ranks * forwards):
            raise ConfigError(
                f"{part.name(total_key)}: {total} is not a multiple of {ranks} ranks x "
                f"{steps_key} = {forwards}"
            )
        part.becomes(total_key, "train.micro_batch", total // (ranks * forwards), "a rank's share")
    if total:
        part.becomes(total_key, "train.global_batch", total)
    if micro:
        part.becomes(micro_key, "train.micro_batch", micro)
    _accumulation(part, (total_key, micro_key, steps_key), total, micro, steps)


def _accumulation(
    part: Part,
    keys: tuple[str, str, str],
    total: int | None,
    micro: int | None,
    steps: int | None,
) -> None:
    total_key, micro_key, steps_key = keys
    ranks = part.account.ranks
    if total:
        part.same(steps_key, "follows from global_batch, micro_batch and the ranks")
    elif steps is None and micro and ranks:
        if not part.is_set(steps_key) and not part.is_set(total_key):
            part.becomes(micro_key, "train.global_batch", micro * ranks, f"x {ranks} ranks")
            part.assume("train.global_batch", micro * ranks, f"{micro} x {ranks} ranks")
    elif steps is None and micro:
        part.warn(f"train.global_batch is {micro} x accumulation x ranks: say --ranks N")
    elif steps and micro and ranks:
        note = f"{micro} x {steps} x {ranks} ranks"
        part.becomes(steps_key, "train.global_batch", micro * steps * ranks, note)
    elif steps:
        made_of = f"{micro or 'micro_batch'} x {steps} x ranks"
        need = "say --ranks N" if micro else "set both"
        part.refuse(steps_key, f"train.global_batch is {made_of}: {need}")


def _check_total(
    part: Part, total: int, micro: int, steps: int | None, keys: tuple[str, str, str]
) -> None:
    total_key, micro_key, steps_key = (part.name(key) for key in keys)
    ranks = part.account.ranks
    share = micro * (steps or 1) * (ranks or 1)
    exact = steps is not None and ranks is not None
    if (exact and total != share) or total % share:
        sizes = f"{micro_key} = {micro}"
        sizes += f" x {steps_key} = {steps}" if steps else ""
        sizes += f" x {ranks} ranks" if ranks else ""
        wanted = "is not" if exact else "is no multiple of"
        raise ConfigError(f"{total_key} = {total} {wanted} {sizes} = {share}; correct one of them")


def translate_replicas(part: Part, key: str, strategy: str, group: int, note: str) -> None:
    """Groups of so many ranks, each with a copy of the model."""
    ranks = part.account.ranks
    if ranks is None:
        part.refuse(key, f"mesh.replicate is ranks / {group}: say --ranks N")
    elif group < 1 or ranks % group:
        part.refuse(key, f"groups of {group} do not divide {ranks} ranks; correct it, or --ranks N")
    elif group == ranks:
        part.becomes(key, "shard.strategy", "full_shard", f"one group of all {ranks} ranks")
    else:
        part.becomes(key, "shard.strategy", strategy, note)
        part.becomes(key, "mesh.replicate", ranks // group)
        part.becomes(key, "mesh.shard", group)


def optimizer_refusal(name: str) -> str:
    """Why the job has no optimizer of that name; empty if it has one."""
    plain = name.lower()
    if plain == "adafactor":  # transformers has its own: relative steps, other defaults
        return "the job's is torch's, with other steps and defaults; try optim.kind = 'adafactor'"
    if plain in OPTIMIZERS:
        return ""
    if plain in REFUSED:
        return f"{plain} {REFUSED[plain]}; use adamw"
    if "lion" in plain:
        return "the job has none; adamw takes 3 to 10 times Lion's rate, and less decay"
    if plain.startswith(("onebit", "zeroone")):
        return "gradients are sent whole; adamw with shard.reduce_dtype = bfloat16 halves them"
    if "8bit" in plain or "4bit" in plain:
        return (
            "optimizer states are float32, sharded over the ranks; adamw, and more ranks for memory"
        )
    return (
        f"{shown(name)} is none of torch.optim that the job has; use one of {', '.join(OPTIMIZERS)}"
    )


def translate_compute(part: Part, key: str, dtype: str | None, reduce_dtype: str | None) -> None:
    """The dtype of forward and backward, and that of the sums of gradients."""
    if dtype == "float16":
        part.refuse(key, NO_FLOAT16)
    elif dtype == "float32":
        part.same(key, "float32")
    elif dtype:
        part.becomes(key, "shard.param_dtype", dtype, "master weights stay float32")
        if reduce_dtype == "bfloat16":
            part.assume(
                "shard.reduce_dtype", dtype, f"{part.name(key)}: gradients are sent in it too"
            )
