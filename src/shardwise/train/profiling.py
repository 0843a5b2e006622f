"""Traces of chosen steps (`log.profile_steps`): RUN/profile/step_00000010_rank_0.json, for
chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@contextlib.contextmanager
def profiled(step: int, steps: tuple[int, ...], folder: Path, rank: int) -> Generator[None]:
    """Around a step: traces it if it is one of `steps`."""
    if step not in steps:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        yield
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"step_{step:08d}_rank_{rank}.json"))
