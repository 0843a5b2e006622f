"""The engine on the simulated device: to the CPU's bits, without a race, without a touch of device
memory by the host, whatever the delays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
import simulated_device
from engine.engine_kit import HYBRID_STRATEGIES, STRATEGIES
from shardwise.comm import streams
from shardwise.engine.core.state import units_in
from simulated_device.programs import PROGRAMS as USUAL
from simulated_device.programs import Place, train
from simulated_device.programs_more import MORE_PROGRAMS, WIRES
from simulated_device.programs_rare import RARE_PROGRAMS
from simulated_device.worlds import run_on_devices

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
PROGRAMS = {**USUAL, **MORE_PROGRAMS, **RARE_PROGRAMS}
HIGHEST_US = 300
SEEDS = (None, 1, 2)  # None: no delays

STEADY = (*STRATEGIES, *HYBRID_STRATEGIES, "accumulation", "offload of parameters", *WIRES)


def name_lanes() -> None:
    made = streams.streams_for(torch.device(simulated_device.DEVICE, 0))
    for name, stream in made._lanes.items():
        simulated_device.name_stream(stream, name)


def compare(rank: int, world: int, name: str, folder: Path) -> None:
    """Run a program on the CPU, then on the device for each seed."""
    program = PROGRAMS[name][1]
    expected = program(Place("cpu", rank, world, folder / "cpu"))
    name_lanes()
    for seed in SEEDS:
        torch.manual_seed(0)
        simulated_device.clear()
        if seed is not None:
            simulated_device.slow_down(HIGHEST_US, seed=100 * seed + rank)
        place = Place(simulated_device.DEVICE, rank, world, folder / f"seed{seed}")
        found = program(place)
        races = simulated_device.report().races
        assert not races, "\n".join(races[:20])
        for key, tensor in expected.items():
            # The order in which Gloo adds three ranks depends on the sizes, which padding changes.
            is_right = torch.allclose if world == 3 else torch.equal
            assert is_right(tensor, found[key]), f"{key}, seed {seed}: {tensor} {found[key]}"
        assert found.keys() == expected.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_the_cpu(name: str, tmp_path: Path) -> None:
    run_on_devices(PROGRAMS[name][0], compare, name, tmp_path)


# -- what a step costs ---------------------------------------------------------------------------
def cost(rank: int, world: int, name: str, folder: Path) -> tuple[int, dict[str, int]]:
    place = Place(simulated_device.DEVICE, rank, world, folder)
    PROGRAMS[name][1](place)
    return place.steady.record_streams, place.steady.host_waits


@pytest.mark.parametrize("name", STEADY)
def test_a_steady_step_holds_nothing_up(name: str, tmp_path: Path) -> None:
    """Lifetimes follow from the order of streams, so no block waits until its users have passed;
    and the host goes on, but for one wait where an optimizer on the host needs gradients.
    """
    for records, waits in run_on_devices(PROGRAMS[name][0], cost, name, tmp_path):
        assert records == 0
        assert sum(waits.values()) == (1 if "offload" in name else 0), waits


# -- torch's own engine --------------------------------------------------------------------------
def train_both(rank: int, world: int, name: str, folder: Path) -> None:
    """FSDP2 and ours on the device. No race in either, so none is seen where none is."""
    simulated_device.slow_down(HIGHEST_US, seed=rank)
    place = Place(simulated_device.DEVICE, rank, world, folder)
    program = PROGRAMS[name][1]
    weights = [program(place)]
    given = program.keywords
    policy = given.get("mp_policy")

    def by_torch(place: Place, model: Any) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = model.to(place.device)
        options: dict[str, Any] = {"mesh": place.mesh()}
        if policy is not None:
            options["mp_policy"] = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype)
        for layer in model.layers:
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    more = {key: value for key, value in given.items() if key != "mp_policy"}
    weights.append(train(place, **more, prepare=by_torch))
    races = simulated_device.report().races
    assert not races, "\n".join(races[:20])
    for key, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][key]), key


@pytest.mark.parametrize(
    "name", ["large, full_shard", "uneven, full_shard", "large, bf16", "accumulation"]
)
def test_equals_fsdp2(name: str, tmp_path: Path) -> None:
    run_on_devices(2, train_both, name, tmp_path)


# -- what it would not miss ----------------------------------------------------------------------
class Careless(streams.DeviceStreams):
    """Streams that leave one thing out."""

    forgotten = ""

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        if self.forgotten != f"fork {name}":
            with super().lane(name):
                yield
        else:
            with self._module.stream(self._lanes[name]):
                yield

    def mark(self) -> None:
        if self.forgotten != "mark":
            super().mark()

    def wait(self, event: Any) -> None:
        if self.forgotten != "wait":
            super().wait(event)


def forget(rank: int, world: int, what: str, folder: Path) -> list[str]:
    Careless.forgotten = what
    streams.MAKERS[simulated_device.DEVICE] = Careless
    place = Place(simulated_device.DEVICE, rank, world, folder)
    with contextlib.suppress(AssertionError):  # in the middle of the program it is told, too
        PROGRAMS["full_shard"][1](place)
    return simulated_device.report().races


@pytest.mark.parametrize("what", ["mark", "fork reduce", "wait"])
def test_a_planted_fault_is_found(what: str, tmp_path: Path) -> None:
    for races in run_on_devices(2, forget, what, tmp_path):
        assert races


# -- faults that were found ----------------------------------------------------------------------
def open_on_both(rank: int, world: int) -> str:
    for device in ("cpu", simulated_device.DEVICE):
        mesh = init_device_mesh(device, (world,))
        model = sw.fully_shard(nn.Linear(8, 8), mesh=mesh, transport="c10d")
    model(torch.ones(2, 8, device=device)).sum().backward()
    (transport,) = {
        stage.transport for unit in units_in(model) for b in unit.buckets for stage in b.stages
    }
    return str(transport._device.type)


def test_meshes_of_two_devices() -> None:
    """A model on the CPU, then one on a device of the same ranks: the second took the transport of
    the first, which orders nothing.
    """
    assert run_on_devices(2, open_on_both) == ["sim", "sim"]


def start_from_both(rank: int, world: int) -> list[bool]:
    torch.manual_seed(rank)
    model = nn.Linear(8, 8)
    first = model.weight.detach().clone(), model.bias.detach().clone()
    dist.broadcast_object_list(held := [first], src=0)
    model.weight = nn.Parameter(model.weight.detach().to(simulated_device.DEVICE))
    sw.fully_shard(model, mesh=init_device_mesh(simulated_device.DEVICE, (world,)))
    found = (model.weight.full_tensor().cpu(), model.bias.full_tensor().cpu())
    return [torch.equal(ours, wanted) for ours, wanted in zip(found, held[0], strict=True)]


def test_parameters_on_two_devices() -> None:
    """Ranks start from different weights, on the host and on the device: checksums of both were put
    into one tensor.
    """
    assert run_on_devices(2, start_from_both) == [[True, True]] * 2
