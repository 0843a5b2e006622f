"""The simulated device by itself: what it finds, counts and refuses, and that it computes the
CPU's bits. Each body runs in a process of its own, since a process that knows the device keeps it.
"""

from __future__ import annotations

import copy
import ctypes
import datetime
import inspect
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import simulated_device
from simulated_device import worked_example
from simulated_device.worlds import run_on_devices, try_on_devices

# The first of them builds the device, a minute on a quiet core.
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
SLOW_US = 30_000


def side_stream(delay_us: int = 0) -> torch.Stream:
    stream = torch.sim.Stream()
    simulated_device.name_stream(stream, "side")
    simulated_device.delay(stream, delay_us, delay_us)
    return stream


# -- what it finds -------------------------------------------------------------------------------
def find_races(rank: int, world: int) -> dict[str, list[str]]:
    side, found = side_stream(), {}

    def note(name: str) -> None:
        found[name] = simulated_device.report().races
        torch.sim.synchronize()
        simulated_device.clear()

    x = torch.ones(1000, device="sim")
    with torch.sim.stream(side):
        y = x * 2
    note("reads too early")
    with torch.sim.stream(side):
        y = x * 3
    x.add_(1)
    note("writes too early")
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        y = x[:500] * 2
    x[500:].add_(1)
    note("other bytes")
    with torch.sim.stream(side):
        x[:500].add_(1)
    torch.sim.current_stream().wait_event(side.record_event())
    y = x + 1
    note("ordered by an event")
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        y = x * 2
    del x
    torch.empty(10, device="sim")  # takes another block, but might have taken that of x
    note("reuse")
    x = torch.ones(1000, device="sim")
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        y = x * 2
        x.record_stream(side)
    del x
    torch.empty(1000, device="sim")
    note("reuse behind record_stream")
    assert y.numel() == 1000
    return found


def test_races_are_found() -> None:
    (found,) = run_on_devices(1, find_races)
    assert any("compute writes (fill_" in race for race in found["reads too early"])
    (race,) = found["writes too early"]
    assert race.startswith("side reads (mul.out at test_simulated_device.py:")
    assert "; compute writes (add.out at test_simulated_device.py:" in race
    (race,) = found["reuse"]
    assert "side reads (mul.out" in race and "compute may reuse the memory, freed at test_" in race
    quiet = ("other bytes", "ordered by an event", "reuse behind record_stream")
    assert [race for name in quiet for race in found[name]] == []


def touch(rank: int, world: int) -> None:
    x = torch.ones(64, device="sim")
    torch.sim.synchronize()
    ctypes.c_float.from_address(x.data_ptr() + 8)
    print(ctypes.c_float.from_address(x.data_ptr() + 8).value)


def test_a_touch_by_the_host_ends_the_process() -> None:
    (outcome,) = try_on_devices(1, touch)
    assert (outcome.kind, outcome.text) == ("died", "killed by SIGSEGV")
    assert "the host touched device memory" in outcome.output
    assert "byte 8 of a block of 512 on the stream 'compute'" in outcome.output
    assert "test_simulated_device.py" in outcome.output and "touch" in outcome.output


def fail_in_a_kernel(rank: int, world: int) -> None:
    F.embedding(torch.tensor([7]).to("sim"), torch.ones(3, 2).to("sim"))


def test_a_kernel_that_fails_ends_the_process() -> None:
    (outcome,) = try_on_devices(1, fail_in_a_kernel)
    assert (outcome.kind, outcome.text) == ("died", "the process ended with exit code 77")
    assert "a kernel on stream 0 failed: index out of range" in outcome.output


def mix_devices(rank: int, world: int) -> None:
    x = torch.ones(3, 4, device="sim")
    assert (x * torch.tensor(2.0)).sum().item() == 24  # numbers may come from the host
    assert x[torch.tensor([0, 2])].shape == (2, 4)  # and indices
    with pytest.raises(RuntimeError, match="at least two devices, sim:0 and cpu"):
        x + torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="'index' is on the CPU, others are on sim:0"):
        F.embedding(torch.tensor([1]), x)
    with pytest.raises(RuntimeError, match="one simulated device, index 0"):
        torch.ones(3, device="sim:1")


def test_tensors_of_the_host_are_refused() -> None:
    run_on_devices(1, mix_devices)


# -- time, order, memory -------------------------------------------------------------------------
def go_on(rank: int, world: int) -> None:
    side = side_stream(SLOW_US)
    started_s = time.monotonic()
    with torch.sim.stream(side):
        x = torch.zeros(4, device="sim")
        for _ in range(5):
            x.add_(1)
        event = side.record_event()
    assert time.monotonic() - started_s < 4 * SLOW_US / 1e6, "the host had to wait"
    assert not event.query()
    torch.sim.current_stream().wait_event(event)
    y = x * 2
    assert not simulated_device.report().host_waits
    assert y.tolist() == [10.0] * 4
    assert time.monotonic() - started_s > 5 * SLOW_US / 1e6
    assert event.query()
    ((what, count),) = simulated_device.report().host_waits.items()
    assert what.startswith("blocking copy to the host at test_simulated_device.py:"), what
    assert count == 1


def test_the_host_goes_on() -> None:
    run_on_devices(1, go_on)


def use_memory(rank: int, world: int) -> None:
    side = side_stream()
    x = torch.empty(300, device="sim")
    assert x.isnan().all() and torch.empty(3, dtype=torch.int32, device="sim").tolist() == [-1] * 3
    address = x.data_ptr()
    del x
    assert torch.empty(290, device="sim").data_ptr() == address  # reused at once, as it is gone
    with torch.sim.stream(side):
        y = torch.empty(300, device="sim")
    assert y.data_ptr() != address  # another stream, another pool
    simulated_device.clear()
    before = simulated_device.report().pools["side"]
    assert before.allocated == before.peak_allocated == 1536
    y.untyped_storage().resize_(0)
    assert simulated_device.report().pools["side"].allocated == 0
    simulated_device.delay(side, SLOW_US, SLOW_US)
    z = torch.ones(300, device="sim")
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        z.add_(1)
        z.record_stream(side)
    address = z.data_ptr()
    del z
    assert torch.ones(300, device="sim").data_ptr() != address
    found = simulated_device.report()
    assert (found.record_streams, found.deferred_frees) == (1, 1)
    torch.sim.synchronize()
    blocks = [torch.empty(300, device="sim") for _ in range(3)]
    assert address in [block.data_ptr() for block in blocks]


def test_memory_is_reused_by_stream() -> None:
    run_on_devices(1, use_memory)


def copy_pinned(rank: int, world: int) -> None:
    x = torch.arange(4.0, device="sim")
    torch.sim.synchronize()
    simulated_device.delay(torch.sim.current_stream(), SLOW_US, SLOW_US)
    pinned = torch.empty(4, pin_memory=True)
    assert pinned.is_pinned()
    simulated_device.clear()
    pinned.copy_(x, non_blocking=True)
    assert pinned.isnan().all()  # what is read too early is seen to be wrong
    assert not simulated_device.report().host_waits
    torch.sim.synchronize()
    assert pinned.tolist() == [0, 1, 2, 3]
    pageable = torch.empty(4)
    simulated_device.clear()
    pageable.copy_(x, non_blocking=True)  # no such thing: the host waits
    assert pageable.tolist() == [0, 1, 2, 3]
    assert [w.partition(" at ")[0] for w in simulated_device.report().host_waits] == [
        "copy to pageable memory"
    ]
    side = side_stream()
    simulated_device.clear()
    with torch.sim.stream(side):
        pinned.copy_(x, non_blocking=True)
    x.copy_(pinned, non_blocking=True)
    races = simulated_device.report().races
    assert any("side writes (copy to pinned memory" in race for race in races), races


def test_pinned_memory() -> None:
    run_on_devices(1, copy_pinned)


# -- numbers -------------------------------------------------------------------------------------
class Mixed(nn.Module):
    """What models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.RMSNorm(16), nn.GroupNorm(4, 16)])
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 17)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x_BLD = self.embed(ids)
        x_BLD = x_BLD + self.conv(x_BLD.mT).mT
        for norm in self.norms:
            x_BLD = x_BLD + norm(x_BLD.flatten(0, 1)).view_as(x_BLD)
        x_BLD = self.drop(F.silu(x_BLD) + F.gelu(x_BLD).cumsum(1).sort(-1).values)
        return self.head(x_BLD.index_select(1, torch.tensor([0, 2], device=ids.device)))


def train_beside_cpu(rank: int, world: int) -> None:
    simulated_device.slow_down(200, seed=rank)
    torch.manual_seed(0)
    models = {"cpu": Mixed(), "sim": None}
    models["sim"] = copy.deepcopy(models["cpu"]).to("sim")
    for device, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            ids = torch.randint(17, (2, 5), generator=torch.Generator().manual_seed(step))
            torch.manual_seed(step)
            loss = F.cross_entropy(
                model(ids.to(device)).flatten(0, 1), ids[:, :2].flatten().to(device)
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(
        models["cpu"].named_parameters(), models["sim"].parameters(), strict=True
    ):
        assert torch.equal(p, q.cpu()), name
    assert simulated_device.report().races == []


def test_bits_are_those_of_the_cpu() -> None:
    run_on_devices(1, train_beside_cpu)


def draw(rank: int, world: int) -> None:
    def numbers(device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.randn(5, device=device)
        y = torch.empty(5, device=device).uniform_()
        return [x.cpu(), y.cpu(), torch.randint(9, (4,), device=device).cpu()]

    for a, b in zip(numbers("cpu"), numbers("sim"), strict=True):
        assert torch.equal(a, b)
    state = torch.sim.get_rng_state()
    first = torch.rand(4, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.equal(first, torch.rand(4, device="sim"))
    generator = torch.Generator("sim").manual_seed(5)
    own = torch.rand(4, device="sim", generator=generator)
    same = torch.rand(4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(own.cpu(), same)


def test_random_numbers() -> None:
    run_on_devices(1, draw)


# -- collectives ---------------------------------------------------------------------------------
def collect(rank: int, world: int) -> None:
    simulated_device.slow_down(300, seed=rank)
    mine = torch.arange(6.0) + 10 * rank

    def both(call: object) -> None:
        """The call's results on the device are those on the CPU."""
        on_cpu, on_device = call("cpu"), call("sim")
        assert torch.equal(on_cpu, on_device.cpu()), (on_cpu, on_device)

    def gathered(device: str) -> torch.Tensor:
        out = torch.empty(12, device=device)
        dist.all_gather_single(out, mine.to(device))
        return out

    def gathered_list(device: str) -> torch.Tensor:
        outs = [torch.empty(6, device=device) for _ in range(world)]
        dist.all_gather(outs, mine.to(device))
        return torch.cat(outs)

    def scattered(device: str) -> torch.Tensor:
        out = torch.empty(3, device=device)
        dist.reduce_scatter_single(out, mine.to(device))
        return out

    def summed(device: str) -> torch.Tensor:
        out = mine.to(device, copy=True)
        dist.all_reduce(out)
        return out

    def sent(device: str) -> torch.Tensor:
        out = mine.to(device, copy=True)
        dist.broadcast(out, src=1)
        return out

    def exchanged(device: str) -> torch.Tensor:
        out = torch.empty(6, device=device)
        dist.all_to_all_single(out, mine.to(device))
        return out

    for call in (gathered, gathered_list, scattered, summed, sent, exchanged):
        both(call)
    mean = mine.to("sim")
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert torch.equal(mean.cpu(), torch.arange(6.0) + 5)
    with pytest.raises(RuntimeError, match="must be contiguous"):
        dist.all_reduce(torch.ones(4, 4, device="sim").t()[:2])


def wait_in_its_ways(rank: int, world: int) -> None:
    x = torch.ones(4, device="sim")
    simulated_device.clear()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert not simulated_device.report().host_waits, "wait() holds the stream, not the host"
    work = dist.all_reduce(x, async_op=True)
    work.wait(datetime.timedelta(seconds=30))
    (wait,) = simulated_device.report().host_waits
    assert wait.startswith("work.wait with a timeout at test_simulated_device.py:")
    simulated_device.clear()
    dist.all_reduce(x, async_op=True)
    y = x * 2  # nobody has waited
    races = simulated_device.report().races
    assert any("writes (all_reduce at " in r and "compute reads (mul.out" in r for r in races)
    assert y.numel() == 4
    torch.sim.synchronize()
    (collective,) = simulated_device.report().collectives
    assert "all_reduce from compute on group" in collective and "writes 16@0" in collective


def test_collectives_are_those_of_gloo() -> None:
    run_on_devices(2, collect)


def test_waiting_for_a_collective() -> None:
    run_on_devices(2, wait_in_its_ways)


# -- the example of docs/accelerators.md ---------------------------------------------------------
def average_by_hand(rank: int, world: int, waits: bool) -> tuple[list[torch.Tensor], list[str]]:
    simulated_device.slow_down(300, seed=rank)
    return worked_example.train(waits), simulated_device.report().races


def test_the_worked_example() -> None:
    (weights, races), (others, _) = run_on_devices(2, average_by_hand, True)
    assert not races
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    for _, races in run_on_devices(2, average_by_hand, False):
        assert "writes (all_reduce at worked_example.py:" in races[0]
        assert "compute reads (" in races[0]
    page = Path(__file__).parents[2] / "docs" / "accelerators.md"
    assert inspect.getsource(worked_example.train) in page.read_text()


# -- where it cannot be had ----------------------------------------------------------------------
def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SIMULATED_DEVICE_DIR", str(tmp_path))
    simulated_device.build.built_path.cache_clear()
    try:
        reason = simulated_device.why_not()
        assert reason == ("building the simulated device takes g++ and ninja, not found in PATH")
    finally:
        simulated_device.build.built_path.cache_clear()
