"""How much of the communication runs beside computation, from the profiler's trace of a step.

Kernels whose names hold "nccl" communicate; all others, with copies and fills, compute. The share
is that of communication's time in which at least one of the others runs. Launches and calls that
make the host wait are counted in the same trace.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from gpu_hour_parts import engines, models
from gpu_hour_parts.settings import Context, Row, Settings
from gpu_hour_parts.speed import why_not_fit

ENGINES = ("shardwise", "fsdp2", "shardwise:shard_grad_op", "ddp")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
NUM_STEPS = 3

Span = tuple[float, float]


def items(settings: Settings) -> list[str]:
    return [f"{size}/bf16/{engine}" for size in ("350M", "1.3B") for engine in ENGINES]


def run(item: str, context: Context) -> Row:
    name, precision, engine = item.split("/")
    size = models.SIZES[name]
    context.device.start_peaks()
    if why := why_not_fit(size, engine, precision, context):
        return {"state": "skipped", "why": why}
    trainer = engines.build_trainer(engine, size.make, context, precision, compiled=False)
    shape = (size.num_sequences, size.num_tokens + 1)
    tokens = torch.randint(size.config.vocab_size, shape).to(context.device.place)
    for _ in range(4):
        trainer.step(tokens)
    context.device.synchronize()
    with torch.profiler.profile(activities=context.device.profiled()) as profiler:
        for _ in range(NUM_STEPS):
            trainer.step(tokens)
        context.device.synchronize()
    path = context.folder / f"overlap_{item}_{context.rank}.json".replace("/", "_")
    profiler.export_chrome_trace(str(path))
    return of_trace(path, NUM_STEPS)


def of_trace(path: Path, num_steps: int) -> Row:
    """A row from a file of `export_chrome_trace`, whose times are in us: of one step."""
    events = json.loads(path.read_text())["traceEvents"]
    found = of_events([event for event in events if event.get("ph") == "X"])
    for name, value in found.items():
        if name.endswith("_us") or name.startswith("num_"):
            found[name] = round(value / num_steps, 1)
    return found


def of_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    on_device = [e for e in events if e.get("cat") in ON_DEVICE]
    comm = union(_span(e) for e in on_device if _is_comm(e))
    compute = union(_span(e) for e in on_device if not _is_comm(e))
    comm_us, hidden_us = length(comm), length(crossing(comm, compute))
    waits = Counter(e["name"] for e in events if e.get("cat") == "cuda_runtime")
    return {
        "comm_us": comm_us,
        "compute_us": length(compute),
        "exposed_us": comm_us - hidden_us,
        "overlap": round(hidden_us / comm_us, 4) if comm_us else None,
        "num_launches": sum(not _is_comm(e) for e in on_device),
        "num_comm_launches": sum(_is_comm(e) for e in on_device),
        "num_waits": sum(waits[name] for name in WAITS),
        "waits": {name: waits[name] for name in WAITS if waits[name]},
    }


def _is_comm(event: dict[str, Any]) -> bool:
    return "nccl" in event["name"].lower()


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event.get("dur", 0.0)


def union(spans: Iterable[Span]) -> list[Span]:
    """The same times without doubles, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def crossing(a: list[Span], b: list[Span]) -> list[Span]:
    """Times that are in both; each is in order and without doubles."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)
