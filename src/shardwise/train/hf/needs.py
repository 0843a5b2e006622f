"""Peak bytes of a rank before anything is allocated, by kind; and what to change where they do not
fit.

    weights, gradients, optimizer     by the layouts that the engine will allocate: exact
    gathered                          the root, the largest unit, and the gradients of both
    activations                       what autograd saves in a forward on the meta device, counted
    logits                            in float32, their log-softmax, and the gradient of both

The first three and the gathered ones are certain: a job that has no room for them is refused. The
rest is an estimate: a job that it does not fit is warned. Both name the smallest change that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from shardwise.engine.services.grouping import choose_units
from shardwise.layout import strategy_named
from shardwise.plan.model import PlannedModel
from shardwise.train.config import (
    Config,
    CustomModelConfig,
    HFModelConfig,
    resolved_strategy,
)
from shardwise.train.hf.activations import Saved, count_saved
from shardwise.train.hf.room import room_on
from shardwise.train.loss.causal import LOGIT_COPIES, LossChoice
from shardwise.train.loss.chunked import rows_of_chunk
from shardwise.train.model import plan_of, unit_of_config
from shardwise.units import text_of_bytes


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of one rank at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int

    @property
    def certain(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.gathered

    @property
    def total(self) -> int:
        return self.certain + self.activations + self.logits

    def __str__(self) -> str:
        parts = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return ", ".join(f"{name} {text_of_bytes(size)}" for name, size in parts if size)


def saved_of(model: nn.Module, config: Config) -> Saved:
    """Of one sample, by a forward on meta; not known of models that are somebody's own."""
    if isinstance(config.model, CustomModelConfig):
        return Saved((), 0, 0, 0, is_known=False)
    groups = choose_units(model, unit_of_config(config, model))
    units = [model.get_submodule(name) for group in groups for name in group]
    return count_saved(model, units, config.data.seq_len)


def needs_of(model: nn.Module, config: Config, world: int, saved: Saved) -> Needs:
    """Of a model on meta, before it is sharded."""
    return needs_of_plan(plan_of(model, config, world), model, config, world, saved)


def needs_of_plan(
    plan: PlannedModel, model: nn.Module, config: Config, world: int, saved: Saved
) -> Needs:
    """The same where `plan_of` has been called."""
    micro, compute = config.train.micro_batch, 4 if config.shard.param_dtype == "float32" else 2
    units = plan.units
    trained = [sum(p.numel for b in u.layout.buckets for p in b.params if p.spec.requires_grad)
               for u in units]  # fmt: skip
    reduced = 4 if config.shard.reduce_dtype == "float32" else 2
    whole_gradients = (trained[-1] + max(trained[:-1], default=0)) * reduced
    strategy, train = strategy_named(resolved_strategy(config)), config.train
    if strategy.defers_reduction and strategy.shard and train.global_batch > micro * world:
        whole_gradients = sum(trained) * reduced  # kept until the last micro-batch
    # Measured in float32.
    activations = saved.activations(config.shard.activation_checkpointing) * micro * compute // 4
    return Needs(
        weights=sum(u.layout.shard_bytes + u.layout.middle_bytes for u in units),
        gradients=sum(u.layout.grad_bytes for u in units),
        optimizer=sum(u.state_bytes for u in units),
        gathered=plan.gathered_bytes + (whole_gradients if world > 1 else 0),
        activations=activations,
        logits=_logits(model, saved.logits * micro, config),
    )


def _logits(model: Any, elements: int, config: Config) -> int:
    """All of them, or those of a chunk."""
    is_hf = isinstance(config.model, HFModelConfig)
    head = model.get_output_embeddings() if is_hf else None  # only there the loss may be chunked
    tokens = config.train.micro_batch * config.data.seq_len
    if type(head) is nn.Linear:
        choice = LossChoice(config.train.chunked_loss, head.in_features, head.weight.requires_grad)
        if choice.chunks(tokens):
            elements = min(elements, rows_of_chunk(head.in_features) * head.out_features)
    return elements * 4 * LOGIT_COPIES


# -- what to change ------------------------------------------------------------------------------
def smallest_change(model: nn.Module, config: Config, world: int, saved: Saved, room: int) -> str:
    """What fits: one change, or the first of several together; else more ranks, or adapters."""

    def fits(changed: Config, ranks: int = world) -> bool:
        return needs_of(model, changed, ranks, saved).total <= room

    steps = _steps(config)
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
    needs = needs_of(model, config, world, saved)
    if not config.lora.rank and needs.total - needs.gradients - needs.optimizer <= room:
        found.append("lora.rank = 16 (adapters in place of all weights)")
    return " or ".join(found) or "a smaller model"


def _steps(config: Config) -> list[tuple[str, Any]]:
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
    if train.chunked_loss == "off":
        found.append(("train.chunked_loss = 'on'", _setting("train", chunked_loss="on")))
    for micro in (train.micro_batch // 2, 1):
        if 0 < micro < train.micro_batch:
            text = f"train.micro_batch = {micro}"
            found.append((text, _setting("train", micro_batch=micro)))
    if shard.param_dtype == "float32":
        text = "shard.param_dtype = 'bfloat16'"
        found.append((text, _setting("shard", param_dtype="bfloat16")))
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
    saved = saved_of(model, config)
    needs, room = needs_of(model, config, world, saved), room_on(device)
    about = "about " if saved.is_known else "very roughly "
    where = "this GPU" if device.type == "cuda" else "a rank's share of this host"
    has = f"{where} has {text_of_bytes(room)}" if room < 2**62 else ""
    said = f"memory of a rank: {about}{text_of_bytes(needs.total)} ({needs}); {has}".rstrip("; ")
    if needs.total <= room:
        return said, ""
    text = smallest_change(model, config, world, saved, room)
    if needs.certain > room:
        return said, (
            f"model.path: {config.model.path} needs {text_of_bytes(needs.certain)} on each rank "
            f"({_certain(needs)}), and {has}; "
            f"what would fit: {text}"
        )
    return f"{said}: it may not fit; what would: {text}", ""


def _certain(needs: Needs) -> str:
    kinds = ("weights", "gradients", "optimizer", "gathered")
    return ", ".join(f"{k} {text_of_bytes(getattr(needs, k))}" for k in kinds)
