"""State on the host and in files beside parameters on a device: the bits of the CPU, no race, no
touch of device memory by the host, whatever the delays. On the simulated device; no GPU."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import shardwise as sw
import simulated_device
from engine.engine_kit import make
from shardwise.offload import OffloadedOptimizer
from simulated_device.programs import STEPS, Place, Tensors, Wide, results
from simulated_device.worlds import run_on_devices

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def program(
    place: Place, state: str, step_on: str, *, halves: bool = False, offload: bool = False
) -> Tensors:
    policy = sw.CPUOffloadPolicy() if offload else sw.OffloadPolicy()
    model = make(Wide)
    model = place.shard(model.bfloat16() if halves else model, offload_policy=policy)
    optimizer = OffloadedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
        state=state,  # type: ignore[arg-type]
        directory=place.folder / "offload" if state == "nvme" else None,
        step_on=step_on,  # type: ignore[arg-type]
        master_weights=halves,
        chunk_bytes=2**17,
    )
    losses, norms = [], []
    for step in range(STEPS):
        batch = place.batch(model, step)
        loss = model(batch.bfloat16() if halves else batch).float().square().mean()
        loss.backward()
        norms.append(sw.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found = results(model, losses=losses, norms=norms)
    kept = [optimizer.state[p] for p in model.parameters()]
    for name in ("exp_avg", *(("master_weight",) if halves else ())):
        found[name] = torch.cat([slots[name].to_local().cpu().flatten() for slots in kept])
    optimizer.close()
    return found


PROGRAMS = {
    "on the device": functools.partial(program, state="none", step_on="device"),
    "on the host": functools.partial(program, state="cpu", step_on="device"),
    "on the host, stepped there": functools.partial(program, state="cpu", step_on="cpu"),
    "in files": functools.partial(program, state="nvme", step_on="device"),
    "in files, stepped on the host": functools.partial(program, state="nvme", step_on="cpu"),
    "in files, with master weights": functools.partial(
        program, state="nvme", step_on="device", halves=True
    ),
    "on the host, with master weights, stepped there": functools.partial(
        program, state="cpu", step_on="cpu", halves=True
    ),
    "in files, parameters on the host": functools.partial(
        program, state="nvme", step_on="device", offload=True
    ),
}


def compare(rank: int, world: int, name: str, folder: Path) -> None:
    expected = PROGRAMS[name](Place("cpu", rank, world, folder / "cpu"))
    for seed in (None, 1):
        torch.manual_seed(0)
        simulated_device.clear()
        if seed is not None:
            simulated_device.slow_down(300, seed=100 * seed + rank)
        found = PROGRAMS[name](Place(simulated_device.DEVICE, rank, world, folder / f"{seed}"))
        races = simulated_device.report().races
        assert not races, "\n".join(races[:20])
        for key, tensor in expected.items():
            assert torch.equal(tensor, found[key]), f"{key}, seed {seed}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_the_cpu(name: str, tmp_path: Path) -> None:
    run_on_devices(2, compare, name, tmp_path)
