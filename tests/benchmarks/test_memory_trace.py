"""The recorder of requests for memory sees what is allocated, freed, and on which stream."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import spawn_ranks

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import memory_trace

    with memory_trace.Recorder() as found:
        yield found


def test_results_are_requests_and_what_nobody_holds_is_freed(recorder: Any) -> None:
    a = torch.empty(1000)
    b = a + 1
    a.view(10, 100).t().mul_(2)  # nothing new
    del a
    c = b[:10].clone()
    assert recorder.trace.events == [
        ("malloc", 0, 4000, "compute"),
        ("malloc", 1, 4000, "compute"),
        ("free", 0),
        ("malloc", 2, 40, "compute"),
    ]
    del b, c
    recorder.end_step()
    assert recorder.trace.events[4:] == [("free", 1), ("free", 2), ("step",)]


def test_storages_that_are_emptied_and_filled(recorder: Any) -> None:
    """Also those that no operator has made; memory belongs to the stream that is current then."""
    storage = torch.UntypedStorage(0)
    lane = recorder.module.Stream()
    with recorder.module.stream(lane):
        storage.resize_(512)
    tensor = torch.empty(0).set_(storage, 0, (128,), (1,))
    recorder.used(tensor)
    storage.resize_(0)
    assert recorder.trace.events == [
        ("malloc", 0, 512, lane.name),
        ("used", 0, "compute"),
        ("free", 0),
    ]


def test_storages_over_the_same_memory_count_once(recorder: Any) -> None:
    with recorder.module.stream(recorder.module.Stream()) as _:
        whole = torch.empty(100)
        part = torch.from_dlpack(whole[10:20])
        part.add_(1)
    assert recorder.trace.events == [("malloc", 0, 400, "stream 1")]
    del part
    assert recorder.trace.events[1:] == []


def test_a_part_that_was_known_first_becomes_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import memory_trace

    whole = torch.empty(100)
    part = torch.from_dlpack(whole[10:20])
    with memory_trace.Recorder() as recorder:
        recorder.adopt([part])
        with recorder.module.stream(recorder.module.Stream()):
            whole.add_(1)
    assert recorder.trace.events == [
        ("malloc", 0, 40, "compute"),
        ("free", 0),
        ("malloc", 1, 400, "compute"),
    ]


def test_what_is_held_at_the_peak_of_the_last_step(recorder: Any) -> None:
    recorder.trace.events[:] = [
        ("malloc", 0, 9, "a"), ("malloc", 1, 90, "a"), ("free", 1), ("step",),
        ("malloc", 2, 5, "b"), ("malloc", 3, 5, "b"), ("free", 2), ("malloc", 4, 4, "a"), ("step",),
    ]  # fmt: skip
    assert recorder.trace.at_peak() == {(9, "a"): 1, (5, "b"): 2}


def of_a_dtensor(mesh: Any) -> list[tuple[Any, ...]]:
    from torch.distributed.tensor import DTensor, Shard

    from memory_trace import Recorder

    x = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)])
    with Recorder() as recorder:
        recorder.adopt([x])
        _ = x + x
        recorder.end_step()
    return recorder.trace.events


def traces(rank: int, world: int) -> dict[str, Any]:
    """In a process of its own, because torch's fake group is its default group."""
    sys.path.insert(0, BENCHMARKS)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import allocator
    from caching_allocator import CachingAllocator, EventsPass
    from memory_trace import Recorder
    from traced_engines import record

    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,))
    build, loss_of = allocator.MODELS["12 blocks"]
    found: dict[str, Any] = {"dtensor": of_a_dtensor(mesh)}
    for engine in ("shardwise", "fsdp2"):
        for skips in (True, False):
            recorder = Recorder(skip_arithmetic=skips)
            model = record(engine, build, loss_of, mesh, "fp32", 3, recorder)
            held = sum(p.to_local().nbytes for p in model.parameters())
            found[f"{engine} {skips}"] = recorder.trace.events
        for events in EventsPass:
            device = CachingAllocator(events)
            steps = recorder.trace.replay(device)
            found[f"{engine} {events}"] = (steps, device.reserved_by(), device.requested_bytes)
        found[f"{engine} held"] = held
    return found


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    with spawn_ranks(1, traces, backend=None) as group:
        (outcome,) = group.join(timeout_s=110)
    assert outcome.kind == "ok", outcome.text
    return outcome.value


def test_a_dtensor_counts_as_its_local_part(traced: dict[str, Any]) -> None:
    sums = [("malloc", 0, 64, "compute"), ("malloc", 1, 64, "compute")]
    assert traced["dtensor"][:2] == sums


@pytest.mark.parametrize("engine", ["shardwise", "fsdp2"])
def test_arithmetic_that_is_left_out_changes_no_request(
    traced: dict[str, Any], engine: str
) -> None:
    assert traced[f"{engine} True"] == traced[f"{engine} False"]
    assert len(traced[f"{engine} True"]) > 1000


@pytest.mark.parametrize("engine", ["shardwise", "fsdp2"])
@pytest.mark.parametrize("events", ["at once", "at sync"])
def test_steps_repeat_and_leave_weights_and_moments(
    traced: dict[str, Any], engine: str, events: str
) -> None:
    steps, by_stream, requested = traced[f"{engine} {events}"]
    assert steps[1].allocated_peak == steps[2].allocated_peak
    assert steps[1].reserved == steps[2].reserved == sum(by_stream.values())
    held = traced[f"{engine} held"]
    assert 3 * held <= requested <= 3.1 * held + 2**20  # what is kept beside them is small
    lanes = {name: size for name, size in by_stream.items() if name != "compute"}
    assert len(lanes) >= 2 and all(lanes.values())
