"""torch's CUDA sanitizer over some steps of each strategy.

`TORCH_CUDA_SANITIZER=1` makes torch look at what each operator reads and writes, and at streams and
events (https://docs.pytorch.org/docs/stable/cuda._sanitizer.html). An access that nothing orders
behind another one raises `CUDASanitizerErrors`: the row is "failed", with the number of reports.

Two controls: a fault that is planted, which has to be reported, and torch's own FSDP2. It knows
tensors by their address, so two views of one buffer are strangers to it, and it does not see what
NCCL does on streams of its own, nor local operators below DTensors.
"""

from __future__ import annotations

import torch

from gpu_hour_parts import engines
from gpu_hour_parts.parity import VARIANTS, make_model, tokens_of
from gpu_hour_parts.settings import Context, Row, Settings

ENVIRONMENT = {"TORCH_CUDA_SANITIZER": "1"}
PLANTED = "a planted fault"
NUM_STEPS = 3


def items(settings: Settings) -> list[str]:
    found = [f"shardwise:{strategy} {p}" for strategy in VARIANTS for p in ("fp32", "bf16")]
    return [PLANTED, "fsdp2 fp32", *found]


def run(item: str, context: Context) -> Row:
    if item == PLANTED:
        return planted(context)
    engine, precision = item.split()
    if why := engines.why_not(engine, context.world):
        return {"state": "skipped", "why": why}
    model = make_model(context)
    model = engines.shard(engine, model, list(model.blocks), context, precision)
    optimizer = engines.adamw(model.parameters(), context)
    for step in range(NUM_STEPS):
        model(tokens_of(context.rank, step, context)).backward()
        optimizer.step()
        optimizer.zero_grad()
    context.device.synchronize()
    return {"reports": 0}


def planted(context: Context) -> Row:
    """A stream writes what another one writes, and neither waits."""
    module = context.device.module
    tensor = torch.zeros(1 << 20, device=context.device.place)
    try:
        with module.stream(module.Stream()):
            tensor.add_(1)
    except Exception as error:
        return {"reports": len(getattr(error, "errors", ())), "first_report": str(error)[:2000]}
    return {"state": "wrong", "reports": 0, "why": "the sanitizer reported nothing"}
