"""Peak bytes of a rank before anything is allocated, by kind; and what to change where they do not
fit.

The step is walked as the engine will execute it (`train/planned.py`): what the engine owns is exact
and certain, so a job that has no room for it is refused. Activations and logits are those of the
model's own forward and backward on fake tensors, or guessed where it looks at values: a job that
they do not fit is warned. Both name the smallest change that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.plan.model import PlannedModel
from shardwise.plan.walk import Point
from shardwise.train.config import Config, HFModelConfig, resolved_strategy
from shardwise.train.hf.room import room_on
from shardwise.train.model import plan_of
from shardwise.train.planned import Planned, Traces, step_of
from shardwise.train.tensor_axis import part_of_rank
from shardwise.units import text_of_bytes


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of one rank in a step: the most of each kind, and of all at one time (`total`)."""

    step: Planned

    @property
    def weights(self) -> int:
        return self.step.walk.most["parameters"]

    @property
    def gradients(self) -> int:
        return self.step.walk.most["gradients"]

    @property
    def optimizer(self) -> int:
        return self.step.walk.most["optimizer"]

    @property
    def gathered(self) -> int:
        """And what gradients are packed in."""
        return self.step.walk.most["gathered"] + self.step.walk.most["buffers"]

    @property
    def activations(self) -> int:
        return self.step.walk.most["activations"]

    @property
    def logits(self) -> int:
        return self.step.walk.most["logits"]

    @property
    def certain(self) -> int:
        return self.step.walk.engine_peak.engine

    @property
    def total(self) -> int:
        return self.step.walk.peak.total

    def __str__(self) -> str:
        peak = self.step.walk.peak
        where = f" of {peak.unit}" if peak.unit else ""
        return f"in the {peak.moment}{where}: {_parts(peak)}"


def _parts(point: Point) -> str:
    found = {"weights" if k == "parameters" else k: size for k, size in point.parts.items()}
    return ", ".join(f"{kind} {text_of_bytes(size)}" for kind, size in found.items() if size)


def needs_of(
    model: nn.Module, config: Config, world: int, traces: Traces, *, on_accelerator: bool = False
) -> Needs:
    """Of a model on meta, before it is sharded."""
    plan = plan_of(model, config, world, on_accelerator=on_accelerator)
    return needs_of_plan(plan, config, world, traces, on_accelerator=on_accelerator)


def needs_of_plan(
    plan: PlannedModel,
    config: Config,
    world: int,
    traces: Traces,
    *,
    on_accelerator: bool = False,
) -> Needs:
    """The same where `plan_of` has been called."""
    return Needs(step_of(plan, config, world, traces, on_accelerator=on_accelerator))


# -- what to change ------------------------------------------------------------------------------
def smallest_change(
    model: nn.Module,
    config: Config,
    world: int,
    traces: Traces,
    room: int,
    *,
    on_accelerator: bool = False,
) -> str:
    """What fits: one change, or the first of several together; else more ranks, or adapters."""

    def needed(changed: Config, ranks: int = world) -> Needs:
        micro = changed.train.micro_batch
        batch = max(micro * ranks, changed.train.global_batch)
        changed = replace(changed, train=replace(changed.train, global_batch=batch))
        return needs_of(model, changed, ranks, traces, on_accelerator=on_accelerator)

    def fits(changed: Config, ranks: int = world) -> bool:
        return needed(changed, ranks).total <= room

    steps = _steps(config, on_accelerator=on_accelerator)
    for text, change in steps:
        if fits(change(config)):
            return text
    together, words = config, list[str]()
    for text, change in steps:
        key = text.partition(" =")[0]
        words = [*(w for w in words if not w.startswith(key)), text]
        together = change(together)
        if fits(together):
            return " and ".join(words)
    found = []
    for changed, said in ((config, ""), (together, f"{' and '.join(words)} on ")):
        alone = replace(changed, mesh=replace(changed.mesh, replicate=1, shard=-1))
        ranks = next((n for n in (world * 2**i for i in range(1, 11)) if fits(alone, n)), 0)
        if ranks:
            found.append(f"{said}{ranks} ranks with as much memory each")
            break
    needs = needed(config)
    if not config.lora.rank and needs.total - needs.gradients - needs.optimizer <= room:
        found.append("lora.rank = 16 (adapters in place of all weights)")
    return " or ".join(found) or "a smaller model"


def _steps(config: Config, *, on_accelerator: bool) -> list[tuple[str, Any]]:
    """Changes that keep the numbers come first."""
    found: list[tuple[str, Any]] = []
    shard, train = config.shard, config.train
    if resolved_strategy(config) not in ("full_shard", "hybrid_shard", "hybrid_full_optimizer"):
        found.append(("shard.strategy = 'full_shard'", _setting("shard", strategy="full_shard")))
    if shard.activation_checkpointing != "full":
        found.append((
            "shard.activation_checkpointing = 'full'",
            _setting("shard", activation_checkpointing="full"),
        ))  # fmt: skip
    if train.chunked_loss == "off" and isinstance(config.model, HFModelConfig):
        found.append(("train.chunked_loss = 'on'", _setting("train", chunked_loss="on")))
    for micro in (train.micro_batch // 2, 1):
        if 0 < micro < train.micro_batch:
            text = f"train.micro_batch = {micro}"
            found.append((text, _setting("train", micro_batch=micro)))
    if shard.param_dtype == "float32":
        text = "shard.param_dtype = 'bfloat16'"
        found.append((text, _setting("shard", param_dtype="bfloat16")))
    if on_accelerator and config.offload.optimizer == "none":
        found.append(("offload.optimizer = 'cpu'", _setting("offload", optimizer="cpu")))
    if on_accelerator and config.offload.parameters == "none":
        found.append(("offload.parameters = 'cpu'", _setting("offload", parameters="cpu")))
    if config.data.seq_len >= 512 and config.model.kind == "hf":
        text = f"data.seq_len = {config.data.seq_len // 2}"
        found.append((text, _setting("data", seq_len=config.data.seq_len // 2)))
    return found


def _setting(section: str, **values: Any) -> Any:
    def change(config: Config) -> Config:
        return replace(config, **{section: replace(getattr(config, section), **values)})

    return change


def check_room(
    model: nn.Module, config: Config, world: int, device: torch.device
) -> tuple[str, str]:
    """(what to tell, why the job is refused): the second is empty where it may start."""
    assert isinstance(config.model, HFModelConfig)
    model = part_of_rank(model, config)
    traces, is_cuda = Traces(model), device.type == "cuda"
    needs = needs_of(model, config, world, traces, on_accelerator=is_cuda)
    room = room_on(device)
    about = "about " if needs.step.is_known else "very roughly "
    where = "this GPU" if device.type == "cuda" else "a rank's share of this host"
    has = f"{where} has {text_of_bytes(room)}" if room < 2**62 else ""
    said = f"memory of a rank: {about}{text_of_bytes(needs.total)} ({needs}); {has}".rstrip("; ")
    if needs.total <= room:
        return said, ""
    text = smallest_change(model, config, world, traces, room, on_accelerator=is_cuda)
    if needs.certain > room:
        return said, (
            f"model.path: {config.model.path} needs {text_of_bytes(needs.certain)} on each rank "
            f"({_parts(_owned(needs.step.walk.engine_peak))}), and {has}; "
            f"what would fit: {text}"
        )
    return f"{said}: it may not fit; what would: {text}", ""


def _owned(point: Point) -> Point:
    return replace(point, activations=0, logits=0)
