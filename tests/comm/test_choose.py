"""Which transport a mesh gets, and what is said about it."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from axes import alone, shard_axis

from ranks import on_ranks
from shardwise.comm import streams
from shardwise.comm.c10d.transport import C10dTransport
from shardwise.comm.choose import Reach, choose, open_transport
from shardwise.comm.fake import FakeTransport
from shardwise.comm.shared_memory import SharedMemoryTransport
from shardwise.comm.transport import Axis
from shardwise.comm.watch import is_watched, replaced
from shardwise.errors import TransportError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ONE = (alone("shard", 0), alone("replicate", 0))
MANY = (Axis("shard", (0, 1), 0, None), alone("replicate", 0))


def reach(axes: tuple[Axis, Axis], device: torch.device = CPU) -> Reach:
    return Reach(*axes, device, axes)


def test_names() -> None:
    assert isinstance(open_transport("c10d", *MANY, CPU), C10dTransport)
    assert isinstance(open_transport("fake", *MANY, CPU), FakeTransport)
    assert choose("fake", reach(MANY)) == ("fake", None)


def test_auto_takes_process_groups_for_devices_and_for_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(streams.MAKERS, "cuda", lambda device: streams.NO_STREAMS)
    assert isinstance(open_transport("auto", *MANY, GPU), C10dTransport)
    name, reason = choose("auto", reach(MANY, GPU))
    assert name == "c10d" and "parameters live on cuda" in str(reason)
    assert isinstance(open_transport("auto", *ONE, CPU), C10dTransport)
    assert choose("auto", reach(ONE)) == ("c10d", "one rank has nobody to share with")
    assert isinstance(open_transport("shared_memory", *ONE, CPU), C10dTransport)


@on_ranks(2)
def test_auto_takes_shared_memory_for_ranks_of_one_host(rank: int, world: int) -> None:
    axes = (shard_axis(rank, world), alone("replicate", rank))
    transport = open_transport("auto", *axes, CPU)
    assert isinstance(transport, SharedMemoryTransport)
    assert open_transport("shared_memory", *axes, CPU) is transport, "one per mesh"
    assert choose("auto", reach(axes)) == ("shared_memory", None)


@on_ranks(2)
def test_shared_memory_that_cannot_work_says_why(rank: int, world: int) -> None:
    axes = (shard_axis(rank, world), alone("replicate", rank))
    with pytest.raises(TransportError, match=r"parameters live on cuda.*Use 'auto' or 'c10d'"):
        open_transport("shared_memory", *axes, GPU)
    assert choose("auto", reach(axes, GPU))[0] == "c10d"


def test_a_users_transport_is_passed_through() -> None:
    mine = FakeTransport(*MANY)
    assert open_transport(mine, *MANY, CPU) is mine


@pytest.mark.parametrize("wrong", [FakeTransport, 3, None])
def test_what_is_no_transport_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="an object with the methods of"):
        open_transport(wrong, *MANY, CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("c10", "did you mean 'c10d'"), ("sharedmemory", "'shared_memory'"), ("x", "choose one of")],
)
def test_unknown_names_get_the_nearest(wrong: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        open_transport(wrong, *MANY, CPU)


def test_who_watches() -> None:
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils.flop_counter import FlopCounterMode

    assert not is_watched()
    with CommDebugMode():
        assert is_watched()
    with FlopCounterMode(display=False):
        assert not is_watched(), "it counts something else"
    original = dist.all_reduce
    dist.all_reduce = functools.partial(original)
    try:
        assert is_watched() and replaced() == ["all_reduce"]
    finally:
        dist.all_reduce = original
    assert not is_watched()
