"""Ranks that have the device: fresh processes, one for each rank, as `spawn_ranks` makes them."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import simulated_device
from ranks import Outcome, RankError, describe, spawn_ranks
from simulated_device.build import build

GROUP_TIMEOUT = datetime.timedelta(seconds=60)


def run_on_devices(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0
) -> list[Any]:
    """Run function(rank, world, *args) on ranks with a device each; results in rank order. The
    default group has Gloo for the CPU and simccl for the device.
    """
    outcomes = try_on_devices(world, function, *args, timeout_s=timeout_s)
    if any(outcome.kind != "ok" for outcome in outcomes):
        raise RankError(describe(outcomes, timeout_s))
    return [outcome.value for outcome in outcomes]


def try_on_devices(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0
) -> list[Outcome]:
    """The same, however the ranks end."""
    skip_unless_built()
    with spawn_ranks(world, _on_device, function, args, backend=None) as group:
        return group.join(timeout_s, 2.0)


def skip_unless_built() -> None:
    """Build the device in this process, once, before ranks ask for it all together."""
    reason = simulated_device.why_not()
    if reason is not None:
        pytest.skip(reason=reason)
    build()


def _on_device(rank: int, world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    simulated_device.load()
    torch.manual_seed(0)
    backend = f"cpu:gloo,{simulated_device.DEVICE}:{simulated_device.BACKEND}"
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=GROUP_TIMEOUT)
    value = function(rank, world, *args)
    torch.accelerator.synchronize()  # a kernel that fails, fails here
    return value
