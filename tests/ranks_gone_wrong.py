"""Tests that fail on purpose, one for each way; test_ranks.py runs a copy and reads the report."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import on_ranks


def note_pid(folder: str) -> None:
    """Let the judge see which process ran this."""
    Path(folder, f"pid-{os.getpid()}").touch()


@on_ranks(2)
def test_passes_before(rank):
    print(f"hello from {rank}")


@on_ranks(2)
def test_assert_on_one_rank(rank):
    print("said before the failure")
    left = rank + 40
    if rank == 1:
        time.sleep(0.01)
    assert left == 40


@on_ranks(2)
def test_first_cause(rank):
    if rank == 0:
        time.sleep(0.2)
        raise RuntimeError("a consequence")
    raise ValueError("the origin")


@on_ranks(2)
def test_peer_waits_for_the_failed_rank(rank):
    if rank == 0:
        raise ValueError("left alone")
    dist.barrier()


@on_ranks(2, timeout_s=1)
def test_hang(rank):
    if rank == 0:
        wait_for_ever()


def wait_for_ever():
    time.sleep(1000)


@on_ranks(2)
def test_exit_code(rank):
    if rank == 1:
        os._exit(7)


@on_ranks(2)
def test_killed(rank):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@on_ranks(2)
def test_crash(rank):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)


@on_ranks(2)
def test_sys_exit(rank):
    if rank == 0:
        sys.exit("gave up")


@on_ranks(2)
def test_skips():
    pytest.skip("no such device")


@on_ranks(2)
def test_unpicklable(rank, capsys):
    print("never printed")


@on_ranks(2)
def test_destroys_the_group():
    dist.destroy_process_group()


@on_ranks(2)
def test_leaves_a_mess(rank):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(rank)
    os.environ["SHARDWISE_LEFT"] = "1"
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    assert torch._dynamo.utils.counters["frames"]
    os.chdir("/")


@on_ranks(2)
def test_passes_after():
    assert torch.tensor(0.5).dtype is torch.float32
    assert torch.is_grad_enabled()
    assert torch.initial_seed() == 0
    assert "SHARDWISE_LEFT" not in os.environ
    assert os.getcwd() != "/"
    assert not torch._dynamo.utils.counters["frames"]
    dist.barrier()
