"""Ranks that ended or were stopped: whoever waits for them says so within seconds, by the right
number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from ranks import announce, on_ranks, spawn_ranks
from shardwise.checkpoint.ranks import Ranks
from shardwise.comm import limits, order, waits
from shardwise.comm.board import Board, default_board, whereabouts
from shardwise.comm.exchange import gather_objects
from shardwise.comm.liveness import Process
from shardwise.comm.waits import AtWork, in_slices
from shardwise.errors import PeerTimeoutError, TransportError

LIMIT_S = 60.0  # for a loaded machine, not an expectation


def process_of(child: subprocess.Popen[bytes]) -> Process:
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    return Process(Process.own().place, child.pid, fields[19])


def test_what_is_seen_of_a_process() -> None:
    own = Process.own()
    assert own.state == "runs"
    assert Process.of(own.card) == own
    assert Process("another boot/pid:[1]", own.pid, own.start).state == "unknown"
    assert Process(own.place, own.pid, "1").state == "ended"  # its number is used again
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = process_of(child)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + LIMIT_S
        while process.state != "stopped":
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
    deadline = time.monotonic() + LIMIT_S
    while process.state != "ended":  # nobody has asked for its exit code
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.wait()
    assert process.state == "ended"


def train_until_one_ends(rank: int, world: int, where: str, victim: int) -> str:
    """What the others say when the victim is killed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shardwise.fully_shard(model, transport="c10d")
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    announce("running")
    if rank == victim:
        if where == "leaving":
            order.OrderCheck.end_phase = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
    except TransportError as error:
        return str(error)
    raise AssertionError("nothing was said")


@pytest.mark.parametrize("where", ["leaving", "user"])
def test_c10d_survivors_of_a_kill_name_it(where: str) -> None:
    with spawn_ranks(2, train_until_one_ends, where, 1) as group:
        outcomes = group.join(timeout_s=LIMIT_S)
    assert [o.kind for o in outcomes] == ["ok", "died"]
    text = outcomes[0].value
    assert "rank 1 (process" in text, text
    assert "ended" in text
    assert "branch" not in text


class LostStore:
    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Broken pipe")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize(("agent", "holder"), [("", "rank 0"), ("True", "torchrun's agent")])
def test_a_lost_store_is_named(monkeypatch: pytest.MonkeyPatch, agent: str, holder: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    board = Board(LostStore())  # type: ignore[arg-type]
    board._processes[3] = Process(Process.own().place, os.getpid(), "1")
    for ask in (lambda: board.set("key", "text"), lambda: board.find("key")):
        with pytest.raises(TransportError, match="store of the process group is lost") as caught:
            ask()
        assert holder in str(caught.value)
        assert f"Ended: rank 3 (process {os.getpid()})" in str(caught.value)


@on_ranks(3)
def test_objects_go_round(rank: int, world: int) -> None:
    own = {"rank": rank, "text": "x" * rank * 1000}
    found = gather_objects(own, None, "a test")
    assert [item["rank"] for item in found] == [0, 1, 2]
    assert found[rank] == own
    ranks = Ranks()
    assert ranks.on_rank0(lambda: "y" * 5000) == "y" * 5000
    assert ranks.on_all(lambda: rank) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="rank 1: ArithmeticError: mine"):
        ranks.on_each(lambda: 1 // (rank - 1) if rank != 1 else fail())


def fail() -> None:
    raise ArithmeticError("mine")


def work_and_stay_away(rank: int, world: int) -> str:
    limits.set_wait_limit(3, warn_after=1)
    ranks = Ranks()
    # Longer than the limit, but it says that it is at it.
    assert ranks.on_all(lambda: time.sleep(7 * rank) or rank) == [0, 1]
    try:
        if rank == 0:
            ranks.on_each(lambda: None)
        else:
            time.sleep(14)
            return ""
    except PeerTimeoutError as error:
        return str(error)
    raise AssertionError("nothing was said")


def test_a_rank_at_work_is_waited_for_and_one_elsewhere_is_not() -> None:
    with spawn_ranks(2, work_and_stay_away) as group:
        said = group.join(timeout_s=LIMIT_S)[0]
    assert said.kind == "ok", said.text
    assert "rank 1: in user code" in said.value


@on_ranks(2)
def test_who_is_busy_is_shown(rank: int, world: int) -> None:
    board = default_board()
    assert board is not None
    if rank == 1:
        with AtWork("knitting"):
            time.sleep(2.6)
            dist.barrier()
            dist.barrier()
    else:
        dist.barrier()
        [line] = whereabouts(board, [1])
        assert line.startswith("  rank 1: at work: knitting, for ")
        dist.barrier()


@pytest.mark.parametrize("kind", [waits.Told, AtWork])
def test_whoever_leaves_a_wait_has_nobody_in_the_store(
    kind: type[waits.Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python that ends while a thread is in the store aborts the process."""
    said = []

    def slow(of: object, text: str = "") -> None:
        time.sleep(0.2)
        said.append(text)

    monkeypatch.setattr(waits, "STALL_S", 0.01)
    monkeypatch.setattr(waits, "default_board", object)
    monkeypatch.setattr(waits, "warn_after_s", lambda: 0.01)
    monkeypatch.setattr(waits.Wait, "check", lambda *_: None)
    monkeypatch.setattr(waits.Wait, "describe", lambda *_: "")
    for name in ("post_whereabouts", "clear_whereabouts"):
        monkeypatch.setattr(waits, name, slow)
    before = set(threading.enumerate())
    with kind("what is waited for"):
        time.sleep(0.1)
    assert set(threading.enumerate()) <= before
    assert said[-1] == ""


class Late:
    """A work that is complete just after the first slice of a wait was over."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.num_waits = error, 0

    def wait(self, limit: timedelta) -> None:
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return True


def test_what_comes_when_a_slice_is_over_has_come() -> None:
    work = Late(None)
    in_slices(work, lambda: pytest.fail("it did not take long"))
    assert work.num_waits == 2
    with pytest.raises(RuntimeError, match="Connection reset"):
        in_slices(Late(RuntimeError("Connection reset")), lambda: pytest.fail("likewise"))
