"""Step time, host time and memory of each engine, on decoders of all sizes that fit.

step_s      mean of steps that are given to the device one behind the other
enqueue_s   host time of a step on an idle device, until the last call has returned: median
alone_s     such a step until the device is idle again: median
"""

from __future__ import annotations

import statistics
import time

import torch

from gpu_hour_parts import engines, models
from gpu_hour_parts.settings import Context, Row, Settings

ONE_AXIS = ("shardwise", "fsdp2", "ddp", "shardwise:shard_grad_op", "fsdp2:keep")
TWO_AXES = ("shardwise:hybrid_shard", "fsdp2:hybrid", "shardwise:hybrid_full_optimizer")
COMPILED = ("shardwise", "fsdp2", "ddp")
USABLE = 0.92  # of what is free; the rest is cut up


def items(settings: Settings) -> list[str]:
    """SIZE/PRECISION/ENGINE[/compiled], small ones first."""
    names = ONE_AXIS + (TWO_AXES if settings.world >= 4 and settings.world % 2 == 0 else ())
    if settings.is_dry:
        return ["tiny/bf16/shardwise", "tiny/bf16/fsdp2", "tiny/fp32/ddp"]
    found = []
    for size in models.SIZES:
        found += [f"{size}/bf16/{name}" for name in names]
        found += [f"{size}/bf16/{name}/compiled" for name in COMPILED]
        if size in ("125M", "350M"):
            found += [f"{size}/fp32/{name}" for name in COMPILED]
    return found


def run(item: str, context: Context) -> Row:
    name, precision, engine, *compiled = item.split("/")
    size = models.sizes(context.is_dry)[name]
    context.device.start_peaks()
    if why := why_not_fit(size, engine, precision, context):
        return {"state": "skipped", "why": why}
    torch.compiler.reset()  # the blocks of all sizes are one function to it
    trainer = engines.build_trainer(engine, size.make, context, precision, bool(compiled))
    source = torch.Generator().manual_seed(context.rank)
    shape = (size.num_sequences, size.num_tokens + 1)
    tokens = torch.randint(size.config.vocab_size, shape, generator=source)
    found = measure(trainer, tokens.to(context.device.place), context)
    per_step = size.num_sequences * size.num_tokens * context.world
    return {
        **found,
        "tokens_per_s": round(per_step / found["step_s"]),
        "num_params": size.num_params,
        "tokens_per_step": per_step,
        "expected_bytes": size.needs_bytes(context.world, precision, engine == "ddp"),
        **(context.device.peaks() or {}),
    }


def why_not_fit(size: models.Size, engine: str, precision: str, context: Context) -> str:
    """Empty where there is room on all ranks; behind `start_peaks`, which frees what is cached."""
    free = context.device.free_bytes()
    if free is None:
        return ""
    free = int(-engines.largest(-free, context))
    needs = size.needs_bytes(context.world, precision, engine == "ddp")
    if needs <= USABLE * free:
        return ""
    return f"does not fit: about {needs / 2**30:.0f} GiB of {free / 2**30:.0f}"


def measure(trainer: engines.Trainer, tokens: torch.Tensor, context: Context) -> Row:
    num_warmup, num_alone, num_timed = (1, 2, 3) if context.is_dry else (4, 5, 12)
    device = context.device
    for _ in range(num_warmup):
        loss = trainer.step(tokens)
    enqueue, alone = [], []
    for _ in range(num_alone):
        device.synchronize()
        began = time.perf_counter()
        trainer.step(tokens)
        enqueue.append(time.perf_counter() - began)
        device.synchronize()
        alone.append(time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(num_timed):
        loss = trainer.step(tokens)
    device.synchronize()
    step_s = (time.perf_counter() - began) / num_timed
    return {
        "step_s": round(engines.largest(step_s, context), 6),
        "enqueue_s": round(statistics.median(enqueue), 6),
        "alone_s": round(statistics.median(alone), 6),
        "loss": round(float(loss), 4),
    }
