"""While a job of one host runs, nothing of it can be reached from another host."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "shardwise.cli"]
TINY = """
[run]
device = "cpu"
[model]
dim = 16
layers = 1
heads = 2
[data]
source = "text.txt"
seq_len = 16
[train]
steps = 1000
global_batch = 4
micro_batch = 2
[optim]
warmup_steps = 2
"""
LIMIT_S = 180.0  # for a loaded machine, not an expectation


def family(pid: int) -> set[int]:
    """A process and all below it."""
    found, rest = set(), [pid]
    while rest:
        found.add(pid := rest.pop())
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                rest += map(int, (task / "children").read_text().split())
    return found


def listening(pids: set[int]) -> list[str]:
    """Local addresses, as the kernel writes them, of sockets on which these processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(descriptor.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1].partition(":")[0])
    return found


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "job.toml", "--nproc=2", "--run.dir=run"],
        pytest.param(
            ["verify", "job.toml", "--ranks=2", "--strategies=full_shard", "--steps=2"],
            marks=pytest.mark.long,  # it has other rungs before
        ),
        ["bench", "job.toml", "--engines=shardwise,ddp", "--nproc=2"],
    ],
    ids=["train", "verify", "bench"],
)
def test_loopback_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # meant for jobs of several hosts
    Path("text.txt").write_text("one two three four five six seven " * 200)
    Path("job.toml").write_text(TINY)
    found: set[str] = set()
    with Path("log").open("w") as log:
        job = subprocess.Popen([*COMMAND, *arguments], stdout=log, stderr=log)
        deadline = time.monotonic() + LIMIT_S
        try:
            while job.poll() is None and time.monotonic() < deadline:
                now = listening(family(job.pid))
                found |= set(now)
                if len(now) >= 2:  # both ranks are there: not much will come
                    deadline = min(deadline, time.monotonic() + 2)
                time.sleep(0.02)
        finally:
            job.kill()
            job.wait()
    assert found == {"0100007F"}, Path("log").read_text()
