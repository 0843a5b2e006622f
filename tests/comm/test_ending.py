"""A program that used Gloo ends without its threads being killed in the middle of something."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardwise.comm import ending

PROGRAM = """
import torch, torch.distributed as dist, torch.nn as nn
import shardwise
dist.init_process_group("gloo")
model = shardwise.fully_shard(nn.Linear(64, 64))
for _ in range(2):
    loss = model(torch.randn(4, 64)).square().mean()
    loss.backward()
    mean = loss.detach() / 2
    dist.all_reduce(mean)
dist.destroy_process_group()
"""


def test_it_waits_for_a_thread_that_works() -> None:
    """One of Gloo's name, which computes without Python's lock and then sleeps."""
    ended: list[float] = []
    named, may_end = threading.Event(), threading.Event()

    def work() -> None:
        name = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/comm")
        name.write_text("pt_gloo_runloop")
        data = bytes(60_000_000)
        named.set()
        hashlib.sha256(data)
        ended.append(time.monotonic())
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    named.wait()
    ending.wait_for_gloo()
    assert ended, "it did not wait"
    may_end.set()
    thread.join()
    ending.wait_for_gloo()  # nobody is there


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_program_that_ends_behind_a_collective(tmp_path: Path) -> None:
    """As it is written by anybody; torch alone dies in some of such runs."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(program)]
    for _ in range(10):
        done = subprocess.run([sys.executable, *launcher], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
