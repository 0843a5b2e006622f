"""DeepSpeed ZeRO stage 1, 2 (default) or 3, on CPU ranks over Gloo, with torch's AdamW.

DeepSpeed would compile its shared-memory operator first, which takes minutes and leaves a lock
behind when it is interrupted. Only its inference all-reduce uses that operator, so it is off here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from shardwise.bench.traffic import Traffic, count_collectives
from shardwise.bench.trainers import Setup
from shardwise.bench.user import checked_loss
from shardwise.bench.workload import Batch


class DeepSpeedTrainer:
    """Its engine scales the loss, and decides itself when a step is complete."""

    def __init__(self, engine: Any, is_bf16: bool) -> None:
        self.engine, self._bf16 = engine, is_bf16

    def step(self, batches: Sequence[Batch]) -> Tensor:
        total = torch.zeros(())
        for batch in batches:
            batch = batch.cast(torch.bfloat16) if self._bf16 else batch
            loss = checked_loss(batch.loss_of(self.engine))
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach().float() / len(batches)
        return total

    def traffic(self, step: Callable[[], object]) -> Traffic:
        return count_collectives(step)


def make(setup: Setup) -> DeepSpeedTrainer:
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed: Any = import_module("deepspeed")  # not there where types are checked

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    stage = int(setup.spec.one_of(("1", "2", "3"), "2"))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": setup.num_micro_batches,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000_000,
    }
    if setup.is_bf16:
        config["bf16"] = {"enabled": True}
        config["communication_data_type"] = "fp32"
    engine, *_ = deepspeed.initialize(
        model=setup.model,
        optimizer=setup.adamw(setup.model.parameters()),
        config=config,
        dist_init_required=False,
    )
    return DeepSpeedTrainer(engine, setup.is_bf16)
