"""The stages, in their order."""

from __future__ import annotations

import importlib

from gpu_hour_parts import (
    cases,
    environment,
    gpu_tests,
    memory,
    overlap,
    parity,
    sanitizer,
    speed,
)  # fmt: skip
from gpu_hour_parts.settings import Stage

_ALL = (
    Stage(
        "environment", "devices, versions, links",
        environment.items, environment.run, ("found",), 2, is_alone=True,
    ),
    Stage(
        "parity", "each strategy beside the plain model",
        parity.items, parity.run, ("loss_off", "gradient_off", "weight_off", "tolerance"), 6,
    ),
    Stage(
        "cases", "small programs beside the plain model",
        cases.items, cases.run, ("off", "said"), 6,
    ),
    Stage(
        "tests", "the project's tests that need a GPU",
        gpu_tests.items, gpu_tests.run, ("said",), 8, 450.0, is_alone=True, needs="cuda",
    ),
    Stage(
        "sanitizer", "torch's CUDA sanitizer: reports",
        sanitizer.items, sanitizer.run, ("reports",), 6, needs="cuda",
        environment=sanitizer.ENVIRONMENT,
    ),
    Stage(
        "predicted", "memory by the model of the allocator",
        memory.items, memory.predict, ("allocated_peak_bytes", "reserved_peak_bytes"), 4, 180.0,
        is_alone=True,
    ),
    Stage(
        "memory", "memory by the allocator itself",
        memory.items, memory.run, ("allocated_peak_bytes", "reserved_peak_bytes"), 4,
        needs="accelerator",
    ),
    Stage(
        "overlap", "communication beside computation",
        overlap.items, overlap.run,
        ("overlap", "comm_us", "exposed_us", "num_launches", "num_waits"), 4, needs="cuda",
    ),
    Stage(
        "speed", "steps beside FSDP2 and DDP",
        speed.items, speed.run,
        ("step_s", "enqueue_s", "tokens_per_s", "allocated_peak_bytes", "reserved_peak_bytes"),
        20, 300.0,
    ),
)  # fmt: skip
STAGES = {stage.name: stage for stage in _ALL}


def stage_named(name: str) -> Stage:
    """One of these, or an object of a module, `module:name`, as tests have them."""
    module, colon, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute) if colon else STAGES[name]
