"""Coordinator and members over sockets, in threads: numbers, joins, deaths, restarts."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.checkpoint.boxes import Box
from shardwise.errors import ConfigError, TransportError
from shardwise.replicas import parts
from shardwise.replicas.coordinator import Coordinator, Meeting
from shardwise.replicas.member import Member, Start
from shardwise.replicas.outer import OuterSettings

SHAPES = {"block.w": (5, 3), "b": (4,)}


class Server:
    """A coordinator in a thread; `lines` is what it said."""

    def __init__(self, folder: Path, replicas: int = 2, **settings: float) -> None:
        self.lines: list[str] = []
        patience_s = settings.pop("patience_s", 60.0)
        meeting = Meeting(3, replicas, OuterSettings(**settings), patience_s, token="")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.coordinator = Coordinator(meeting, folder, self.lines.append)
        self.thread = threading.Thread(
            target=self.coordinator.serve, args=(self.listener,), daemon=True
        )
        self.thread.start()

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 20
        while not any(text in line for line in self.lines):
            assert time.monotonic() < end, (text, self.lines)
            time.sleep(0.01)


@pytest.fixture
def members() -> Iterator[list[Member]]:
    made: list[Member] = []
    yield made
    for member in made:
        member.close()


class Replica:
    """One with `world` ranks, which cut the rows of each parameter; values are whole tensors."""

    def __init__(self, server: Server, name: str, seed: int, world: int = 1, form: str = "exact"):
        self.boxes = [list(_boxes(rank, world)) for rank in range(world)]
        self.ranks = [
            Member(
                server.address, name=name, rank=rank, world=world, seed=seed, shapes=SHAPES,
                boxes=self.boxes[rank], form=form,
            )
            for rank in range(world)
        ]  # fmt: skip

    def join(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._on_all("join", whole)

    def exchange(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._on_all("exchange", whole)

    def _on_all(self, what: str, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        starts: dict[int, Start] = {}
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            values = [_cut(whole[name], box) for name, box in self.boxes[rank]]
            try:
                starts[rank] = getattr(self.ranks[rank], what)(values)
            except (ConfigError, TransportError) as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if errors:
            raise errors[0]
        self.start = starts[0]
        found = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
        for rank, start in starts.items():
            assert (start.number, start.steps) == (self.start.number, 3)
            for (name, box), values in zip(self.boxes[rank], start.theta, strict=True):
                _cut(found[name], box).copy_(values)
        return found

    def close(self) -> None:
        for member in self.ranks:
            member.close()


def _boxes(rank: int, world: int) -> Iterator[tuple[str, Box]]:
    for name, shape in SHAPES.items():
        rows = -(-shape[0] // world)
        first = min(rank * rows, shape[0])
        yield name, Box.whole(shape).rows(first, min(first + rows, shape[0]))


def _cut(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


def some(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def together(*calls) -> list:
    found: list = [None] * len(calls)

    def run(index: int) -> None:
        found[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in SHAPES)


def test_the_outer_step_is_that_of_sgd_with_nesterov_momentum(tmp_path: Path) -> None:
    """Two replicas, of 1 and of 3 ranks (one of them without rows of b): to the last bit."""
    server = Server(tmp_path, lr=0.7, momentum=0.9)
    a, b = Replica(server, "a", 1), Replica(server, "b", 2, world=3)
    first = some(0)
    thetas = together(lambda: a.join(first), lambda: (time.sleep(0.3), b.join(some(9)))[1])
    assert equal(thetas[0], first) and equal(thetas[1], first)  # of who came first
    params = {name: nn.Parameter(value.clone()) for name, value in first.items()}
    sgd = torch.optim.SGD(params.values(), lr=0.7, momentum=0.9, nesterov=True)
    for turn in range(3):
        left, right = some(10 + turn), some(20 + turn)
        thetas = together(lambda x=left: a.exchange(x), lambda x=right: b.exchange(x))
        for name, param in params.items():
            param.grad = (left[name] + right[name]) / 2
        sgd.step()
        for theta in thetas:
            assert equal(theta, {name: param.detach() for name, param in params.items()})
        assert a.start.number == b.start.number == turn + 1 and a.start.replicas == 2
    for replica in (a, b):
        for member in replica.ranks:
            member.leave()
    server.thread.join(20)
    assert not server.thread.is_alive(), "all have left in order"


def test_int8_is_within_its_bound(tmp_path: Path) -> None:
    server = Server(tmp_path, replicas=1, lr=1.0, momentum=0.0)
    replica = Replica(server, "a", 1, form="int8")
    theta, difference = replica.join(some(0)), some(1)
    after = replica.exchange(difference)
    for name in SHAPES:
        error = (theta[name] - after[name] - difference[name]).abs().max()
        assert 0 < error <= difference[name].abs().max() / 254 * 1.001 + 1e-6
    replica.close()
    boxes = [("w", Box.whole((1000,)))]
    assert parts.num_bytes(boxes, "int8") < 0.27 * parts.num_bytes(boxes, "exact")


def test_a_death_and_a_return(tmp_path: Path) -> None:
    """No round of the other waits for long, and who comes back has its weights."""
    server = Server(tmp_path, lr=1.0, momentum=0.0)
    a, b = Replica(server, "a", 1), Replica(server, "b", 2, world=2)
    first = some(0)
    together(lambda: a.join(first), lambda: b.join(first))
    b.ranks[1].close()  # of one rank of it; the other one hears of it when it asks
    alone = a.exchange(some(1))
    assert a.start.replicas == 1
    assert equal(alone, {name: first[name] - some(1)[name] for name in SHAPES})
    with pytest.raises(TransportError, match="another rank of this replica has ended"):
        b.ranks[0].exchange([_cut(first[name], box) for name, box in b.boxes[0]])
    server.wait_for("replica b is gone")
    server.lines.clear()
    back = Replica(server, "b", 2, world=2)
    joined: list[dict[str, Tensor]] = []
    thread = threading.Thread(target=lambda: joined.append(back.join(some(5))))
    thread.start()
    server.wait_for("replica b is there, 2 ranks")  # it waits for the round to end
    second = a.exchange(some(2))
    thread.join(20)
    assert a.start.replicas == back.start.replicas == 2 and equal(joined[0], second)
    a.close()
    back.close()


def test_one_that_dies_while_it_waits_is_noticed_and_may_come_back(tmp_path: Path) -> None:
    """Before the first round, and behind its own part of one: what it sent counts no more."""
    server = Server(tmp_path, lr=1.0, momentum=0.0)
    for _ in range(2):
        a = Replica(server, "a", 1)
        thread = threading.Thread(target=lambda a=a: _quiet(a.join, some(0)))
        thread.start()
        server.wait_for("replica a is there")
        a.ranks[0]._stream.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        server.wait_for("replica a is gone")
        thread.join(20)
        server.lines.clear()
    a, b = Replica(server, "a", 1), Replica(server, "b", 2)
    first = together(lambda: a.join(some(0)), lambda: b.join(some(0)))[0]
    thread = threading.Thread(target=lambda: _quiet(a.exchange, some(50)))
    thread.start()
    time.sleep(0.3)  # it has sent, and waits for b
    a.ranks[0]._stream.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    server.wait_for("replica a is gone")
    after = b.exchange(some(1))
    assert b.start.replicas == 1
    assert equal(after, {name: first[name] - some(1)[name] for name in SHAPES})
    thread.join(20)
    b.close()


def _quiet(call, *args) -> None:
    with contextlib.suppress(TransportError):
        call(*args)


def test_a_late_one_is_left_behind_and_goes_on_with_the_others(tmp_path: Path) -> None:
    server = Server(tmp_path, patience_s=0.3, lr=1.0, momentum=0.0)
    a, b = Replica(server, "a", 1), Replica(server, "b", 2)
    together(lambda: a.join(some(0)), lambda: b.join(some(0)))
    theta = a.exchange(some(1))  # b is late
    assert a.start.number == 1
    assert any("goes on without b, late" in line for line in server.lines)
    late = b.exchange(some(100))  # counts no more; it is given what the others have
    assert b.start.number == 1 and equal(late, theta)
    both = together(lambda: a.exchange(some(2)), lambda: b.exchange(some(3)))
    assert equal(*both) and a.start.number == b.start.number == 2
    mean = {name: theta[name] - (some(2)[name] + some(3)[name]) / 2 for name in SHAPES}
    assert equal(both[0], mean)
    a.close()
    b.close()


def test_a_coordinator_goes_on_where_it_ended(tmp_path: Path) -> None:
    """With its momentum: as one that never ended, to the last bit."""
    thetas = []
    for folder, ends_at in ((tmp_path / "whole", None), (tmp_path / "parts", 2)):
        server = Server(folder, replicas=1, lr=0.7, momentum=0.9)
        replica = Replica(server, "a", 1)
        theta = replica.join(some(0))
        for turn in range(4):
            if turn == ends_at:
                replica.close()
                server.wait_for("replica a is gone")
                server = Server(folder, replicas=1, lr=0.7, momentum=0.9)
                replica = Replica(server, "a", 1)
                assert equal(replica.join(some(77)), theta) and replica.start.number == turn
                assert "goes on at round 2" in server.lines
            theta = replica.exchange(some(turn + 1))
        thetas.append(theta)
        replica.close()
    assert equal(*thetas)


def test_the_first_weights_come_from_another_where_their_bringer_dies(tmp_path: Path) -> None:
    server = Server(tmp_path, replicas=2)
    dying = socket.create_connection(server.address.split(":"))
    from shardwise.replicas import frames

    boxes = [[name, list(box.start), list(box.size)] for name, box in _boxes(0, 1)]
    about = {"op": "join", "name": "dying", "rank": 0, "world": 1, "seed": 5, "token": ""}
    shapes = [[name, list(shape)] for name, shape in SHAPES.items()]
    frames.send(dying, about | {"shapes": shapes, "boxes": boxes})
    assert frames.receive(dying, 0)[0] == {"op": "give"}
    dying.close()
    a, b = Replica(server, "a", 1), Replica(server, "b", 2)
    thetas = together(lambda: a.join(some(0)), lambda: (time.sleep(0.5), b.join(some(1)))[1])
    assert equal(*thetas) and equal(thetas[0], some(0))
    a.close()
    b.close()


def test_who_cannot_take_part_is_told_in_a_line(tmp_path: Path) -> None:
    server = Server(tmp_path, replicas=1)
    a = Replica(server, "a", 1)
    a.join(some(0))
    with pytest.raises(ConfigError, match=r"run\.seed: 1 is also that of replica 'a'"):
        Replica(server, "b", 1).join(some(0))
    other = Replica(server, "c", 3)
    other.ranks[0]._about["shapes"] = [["block.w", [7, 3]], ["b", [4]]]
    with pytest.raises(ConfigError, match=r"model: block.w has shape \[7, 3\] here"):
        other.join(some(0))
    foreign = Replica(server, "d", 4)
    foreign.ranks[0]._about["token"] = "guessed"
    with pytest.raises(ConfigError, match="SHARDWISE_REPLICAS_TOKEN"):
        foreign.join(some(0))
    # Bytes of somebody else: they harm nobody.
    for junk in (b"GET / HTTP/1.1\r\n\r\n" * 3, b"\xff" * 64, b"\x02\0\0\0" + b"\0" * 8 + b"[]"):
        with contextlib.closing(socket.create_connection(server.address.split(":"))) as stream:
            stream.sendall(junk)
            stream.shutdown(socket.SHUT_WR)
            stream.settimeout(10)
            assert stream.recv(1) == b""
    assert a.exchange(some(1)) is not None and a.start.number == 1
    a.close()
