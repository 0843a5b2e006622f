"""torch DistributedDataParallel. It has no mixed precision of FSDP's kind; bf16 is autocast.

last   no_sync() before the last micro-batch
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from shardwise.bench.trainers import AutocastTrainer, Setup, Trainer


def make(setup: Setup) -> Trainer:
    setup.compile_units()
    model = DistributedDataParallel(setup.model, gradient_as_bucket_view=True)

    def around(is_last: bool) -> AbstractContextManager[Any]:
        if "last" in setup.spec.options and not is_last:
            return model.no_sync()
        return contextlib.nullcontext()

    kind = AutocastTrainer if setup.is_bf16 else Trainer
    return kind(model, setup.adamw(model.parameters()), around)
