"""A job's step as the engine will execute it, before it runs: its events, and bytes by kind.

    traces = Traces(model)                         one per model; forwards and backwards are kept
    planned = step_of(plan, config, world, traces)

The model's own forward and loss run on fake tensors (`plan/trace.py`), with a batch like those of
the job; the plan's units and the engine's rules do the rest (`plan/walk.py`). Models that look at
values, and data of other shapes than tokens, are guessed by sizes or left out: `is_known` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.plan.model import PlannedModel
from shardwise.plan.trace import Trace, trace
from shardwise.plan.walk import Walk, Way, plain_trace, walk
from shardwise.train.calling import outputs_of
from shardwise.train.config import (
    Config,
    HFModelConfig,
    gather_limit,
    is_factory,
)
from shardwise.train.decoder import Decoder
from shardwise.train.loss.causal import LOGIT_COPIES, use_token_loss
from shardwise.train.wire_keys import is_wired
from shardwise.units import full_name


@dataclass(frozen=True, slots=True)
class Planned:
    """A step of one rank; `host_bytes`: what lies in host memory beside an accelerator."""

    walk: Walk
    trace: Trace
    is_known: bool
    host_bytes: int = 0


class Traces:
    """Of one unsharded model, by what changes them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._known: dict[Any, tuple[Trace, bool]] = {}

    def of(self, plan: PlannedModel, config: Config) -> tuple[Trace, bool]:
        """And whether it is the model's own."""
        shard, train, data = config.shard, config.train, config.data
        key = (
            train.micro_batch, train.chunked_loss, data.seq_len, shard.param_dtype,
            shard.activation_checkpointing, shard.offload_activations,
            tuple(u.modules for u in plan.units),
        )  # fmt: skip
        if key not in self._known:
            found = self._trace(plan, config)
            known = (found, True) if found else (self._guess(plan, config), False)
            self._known[key] = known
        return self._known[key]

    def _trace(self, plan: PlannedModel, config: Config) -> Trace | None:
        if is_factory(config.data.source):
            return None
        use_token_loss(self.model, config.train.chunked_loss)
        compute = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.shard.param_dtype]
        held: list[Any] = []  # as the trainer's loop holds a batch until its backward is over

        def loss() -> torch.Tensor:
            held.append(batch_of(config))
            return outputs_of(self.model, held[-1])["loss"]

        return trace(
            self.model,
            plan.units,
            loss,
            compute=compute,
            recompute=config.shard.activation_checkpointing,
            to_host=config.shard.offload_activations,
            vocab_size=vocab_size_of(self.model),
        )

    def _guess(self, plan: PlannedModel, config: Config) -> Trace:
        """By the sizes of a usual decoder layer: about 16 times its width and 4 times its hidden
        one a token."""
        if not isinstance(config.model, HFModelConfig):
            return plain_trace(plan.units)
        model: Any = self.model
        sizes = model.config.get_text_config()
        tokens = config.train.micro_batch * config.data.seq_len
        itemsize = 4 if config.shard.param_dtype == "float32" else 2
        hidden = getattr(sizes, "intermediate_size", None) or 4 * sizes.hidden_size
        inside = tokens * (16 * sizes.hidden_size + 4 * hidden) * itemsize
        inputs = tokens * sizes.hidden_size * itemsize
        kept = inside if config.shard.activation_checkpointing == "none" else inputs
        logits = tokens * sizes.vocab_size * 4 * LOGIT_COPIES
        return plain_trace(plan.units, kept, inside - kept, logits)


def batch_of(config: Config) -> Any:
    """Like those of the job, without values."""
    shape = config.train.micro_batch, config.data.seq_len
    if config.data.format == "tokens":
        return torch.zeros(shape[0], shape[1] + 1, dtype=torch.long)
    ids = torch.zeros(shape, dtype=torch.long)
    found = {"input_ids": ids, "labels": ids.clone(), "position_ids": ids.clone()}
    if config.data.packing and config.model.kind == "hf":
        # What transformers makes of borders of documents.
        mask = torch.ones((shape[0], 1, shape[1], shape[1]), dtype=torch.bool)
        found["attention_mask"] = mask
    return found


def vocab_size_of(model: Any) -> int | None:
    """How many scores a token has; None where nobody says."""
    if isinstance(model, Decoder):
        return model.output.out_features
    sizes = getattr(model, "config", None)
    sizes = sizes.get_text_config() if hasattr(sizes, "get_text_config") else sizes
    found = getattr(sizes, "vocab_size", None)
    return found if isinstance(found, int) else None


def step_of(
    plan: PlannedModel,
    config: Config,
    world: int,
    traces: Traces,
    *,
    on_accelerator: bool = False,
) -> Planned:
    """One optimizer step of a rank."""
    found, is_known = (
        (plain_trace(plan.units), False) if traces is None else traces.of(plan, config)
    )
    data_ranks = world // config.mesh.tensor
    micro_batches = max(1, config.train.global_batch // (config.train.micro_batch * data_ranks))
    to_host = on_accelerator and config.offload.parameters == "cpu"
    way = Way(
        micro_batches=micro_batches,
        runs_ahead=on_accelerator,
        gather_limit=gather_limit(config) or None,
        is_ordered=on_accelerator or full_name(config.shard.transport) == "c10d"
        or is_wired(config),
        on_accelerator=on_accelerator,
        frees_gradients=config.optim.in_backward,
        keeps_shards_on_host=to_host,
    )  # fmt: skip
    return Planned(
        walk(plan, found, way), found, is_known, _on_host(plan, config, found, on_accelerator)
    )


def _on_host(plan: PlannedModel, config: Config, found: Trace, on_accelerator: bool) -> int:
    """Bytes in host memory beside those of the accelerator."""
    if not on_accelerator:
        return 0
    total = found.host_bytes
    if config.offload.parameters == "cpu":
        total += sum(u.layout.shard_bytes + u.layout.grad_bytes for u in plan.units)
    if config.offload.optimizer == "cpu" or (
        config.offload.parameters == "cpu" and config.offload.optimizer == "none"
    ):
        total += sum(u.all_state_bytes for u in plan.units)
    return total
