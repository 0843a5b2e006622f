"""The parts of benchmarks/two_hosts.py: predicted bytes, counters, names, and what is left of a
testbed, which is nothing. With root and namespaces also the testbed itself and a tiny run in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beside import BENCHMARKS, from_benchmarks

testbed, two_hosts = from_benchmarks("testbed"), from_benchmarks("two_hosts")
traffic = from_benchmarks("two_hosts_traffic")
HEADER_BYTES, SEGMENT_BYTES = traffic.HEADER_BYTES, traffic.SEGMENT_BYTES
Collective, on_cable = traffic.Collective, traffic.on_cable
sent_across, sent_by = traffic.sent_across, traffic.sent_by

ABSENT = testbed.why_not()
needs_hosts = pytest.mark.skipif(bool(ABSENT), reason=ABSENT or "never")

QUEUES = (
    '[{"kind":"tbf","handle":"1:","dev":"cable","root":true,"options":{"rate":125000000},'
    '"bytes":253515386,"packets":28137,"drops":3,"overlimits":11993}]'
)
DEVICES = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:    1500      10    0    0    0     0          0         0     1500      10    0    0
 cable:  265820    4026    0    0    0     0          0         0 251924720    4036    0    0
"""


def test_ring_neighbours_and_what_crosses() -> None:
    gather = Collective("all_gather", (0, 1, 2, 3), 400)
    assert [sent_by(rank, gather) for rank in (0, 3)] == [{1: 300}, {0: 300}]
    reduce = Collective("all_reduce", (0, 1, 2, 3), 400)
    assert [sent_by(rank, reduce) for rank in (0, 1)] == [{3: 600}, {0: 600}]
    direct = Collective("all_to_all", (0, 1, 2, 3), 400)
    assert sent_by(1, direct) == {0: 100, 2: 100, 3: 100}
    # Two hosts of two ranks: of a ring over all, one neighbour of each host is on the other.
    assert [sent_across(rank, [gather], 2) for rank in range(4)] == [0, 300, 0, 300]
    assert [sent_across(rank, [reduce], 2) for rank in range(4)] == [600, 0, 600, 0]
    assert [sent_across(rank, [direct], 2) for rank in range(4)] == [200] * 4
    inside, between = Collective("all_gather", (0, 1), 80), Collective("all_reduce", (0, 2), 80)
    assert sent_across(0, [inside, between], 2) == 80  # the second one: 2 * 1/2 of it
    assert sent_across(2, [Collective("all_gather", (2, 3), 80)], 2) == 0


def test_headers_and_acknowledgements() -> None:
    assert SEGMENT_BYTES + 52 == testbed.MTU
    sent = on_cable(100 * SEGMENT_BYTES, 0)
    assert sent == 100 * testbed.MTU + 100 * 14  # each with Ethernet's header
    blocks = 10
    assert on_cable(0, blocks * 7 * SEGMENT_BYTES) == pytest.approx(blocks * HEADER_BYTES)
    # What was counted of 251,658,240 bytes that went one way: within 0.1%.
    assert on_cable(251_658_240, 0) == pytest.approx(253_515_386, rel=1e-3)


def test_counters_are_read() -> None:
    sent = testbed.read_sent(QUEUES, DEVICES)
    assert sent == testbed.Sent(253515386, 28137, 251924720, 3)
    assert (sent - sent).wire_bytes == 0


def test_shaping_holds_the_bucket_in_netem_where_delay_is_asked_for() -> None:
    (only,) = testbed.shaping(testbed.Profile(1))
    assert only[:4] == ("replace", "dev", "cable", "root")
    assert only[only.index("rate") + 1] == "1000mbit"
    outer, inner = testbed.shaping(testbed.Profile(0.5, 5))
    assert "netem" in outer and outer[outer.index("delay") + 1] == "5ms"
    assert inner[:4] == ("replace", "dev", "cable", "parent") and "500mbit" in inner


@pytest.fixture
def ended() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def holder(name: str) -> subprocess.Popen[bytes]:
    """Looks like the holder of a host."""
    return subprocess.Popen(["sh", "-c", "sleep 60; :", name, name])


def test_only_hosts_of_benchmarks_that_ended_are_cleaned(ended: int) -> None:
    mine, start = os.getpid(), testbed.start_of(os.getpid())
    assert start > 0 == testbed.start_of(ended)
    alive = holder(f"shardwise-bed-{mine}-{start}-0")
    dead = holder(f"shardwise-bed-{ended}-12345-1")
    reused = holder(f"shardwise-bed-{mine}-{start - 1}-1")  # the pid came again
    try:
        end = time.monotonic() + 10
        while len(testbed.leftovers()) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert set(testbed.leftovers()) == {dead.pid, reused.pid}
        assert testbed.clean() == 2
        assert dead.wait(10) == reused.wait(10) == -signal.SIGKILL
        assert alive.poll() is None and testbed.leftovers() == []
    finally:
        for process in (alive, dead, reused):
            process.kill()
            process.wait()


@pytest.mark.parametrize("lacking", ["root", "tools"])
def test_says_what_is_missing_and_skips(
    lacking: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000 if lacking == "root" else 0)
    monkeypatch.setattr(testbed.shutil, "which", lambda tool: None if tool == "tc" else tool)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    file = tmp_path / "result.json"
    assert two_hosts.main(["--json", str(file)]) == 0
    result = json.loads(capsys.readouterr().out)
    expected = {"root": "needs root", "tools": "apt-get install iproute2"}[lacking]
    assert expected in result["skipped"] and "cores" in result
    assert not file.exists()


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--layouts=3x3", "no layout '3x3'"),
        ("--engines=fsdp3", "no row 'fsdp3'"),
        ("--gbit=fast", "expected numbers"),
        ("--gbit=0", "expected rates"),
        ("--rounds=0", "begin at 1"),
        ("--json=/nowhere/at/all.json", "no folder /nowhere/at"),
    ],
)
def test_mistakes_are_a_line(argument: str, said: str, capsys: pytest.CaptureFixture) -> None:
    assert two_hosts.main([argument]) == 2
    shown = capsys.readouterr().err
    assert said in shown and len(shown.splitlines()) == 1


def cell(step_s: float, sent: float, loss: float) -> dict[str, Any]:
    return {
        "step_s": [step_s, 2 * step_s], "wire_bytes": [[sent, sent]] * 2, "dropped": 0,
        "interface_bytes": [[sent, sent]] * 2, "loss": loss, "num_steps_done": 4,
    }  # fmt: skip


def test_goals_and_problems() -> None:
    names = ["shardwise hybrid", "fsdp2 hybrid", "fsdp2 hybrid bf16"]
    cells = [cell(1.0, 100, 5.0), cell(2.0, 100, 5.02), cell(0.5, 96, 5.1)]
    found = {
        "num_params": 1,
        "predicted": {
            two_hosts.ENGINES[name]: {"by": "layout", "wire_bytes": [100, 100]} for name in names
        },
        "profiles": [
            {
                "cells": {two_hosts.ENGINES[n]: c for n, c in zip(names, cells, strict=True)},
                "reached_gbit_s": 0.99,
            }
        ],
    }
    profile = two_hosts.summary(found, names, [testbed.Profile(1)])["profiles"]["1 Gbit/s"]
    assert profile["rows"]["shardwise hybrid"]["step_s"] == 1.0  # the fastest round
    assert [row["of_fsdp2"] for row in profile["rows"].values()] == [0.5, 1.0, 0.25]
    (goal,) = profile["goals"]
    assert goal == {
        "row": "shardwise hybrid", "of": "fsdp2 hybrid", "ratio": 0.5, "most": 1.0, "reached": True
    }  # fmt: skip
    assert len(profile["problems"]) == 2  # bf16 may have another loss, to 5%, but not other bytes
    assert "fsdp2 hybrid bf16: -4.0% of the bytes" in profile["problems"][0]
    assert "fsdp2 hybrid: loss 5.02" in profile["problems"][1]


@pytest.fixture
def bed() -> Iterator[testbed.TwoHosts]:
    with testbed.TwoHosts(testbed.Profile(0.4)) as found:
        yield found


SEND = """
import socket, sys, time
for _ in range(100):
    try:
        there = socket.create_connection((sys.argv[1], 7000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
there.sendall(bytes(int(sys.argv[2])))
"""
RECEIVE = """
import socket, time
listener = socket.create_server(("", 7000))
there, _ = listener.accept()
began = time.time()
while there.recv(1 << 20):
    pass
print(time.time() - began)
"""


@needs_hosts
def test_hosts_have_only_the_cable_in_common(bed: testbed.TwoHosts) -> None:
    def said(host: testbed.Host, script: str) -> str:
        done = subprocess.run(
            host.command("sh", "-c", script), check=False, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    first, second = bed.hosts
    assert said(first, "cat /proc/sys/kernel/hostname").strip() == first.hostname
    said(first, "echo secret >/dev/shm/file")
    assert "secret" not in said(second, "cat /dev/shm/file") and not Path("/dev/shm/file").exists()
    assert "cable" not in Path("/proc/net/dev").read_text()
    names = said(second, "cut -d: -f1 /proc/net/dev | tail -n +3").split()
    assert sorted(names) == ["cable", "lo"]  # so nothing leaves
    assert said(second, "ls -d /proc/[0-9]*").count("/proc/") < 10  # not those of the machine
    assert said(second, "cat /etc/resolv.conf") == ""


@needs_hosts
def test_the_cable_has_its_rate_and_counts(bed: testbed.TwoHosts) -> None:
    first, second = bed.hosts
    num_bytes = 20_000_000

    def sent(host: testbed.Host) -> testbed.Sent:
        queues = host.run("tc", "-s", "-j", "qdisc", "show", "dev", testbed.CABLE)
        return testbed.read_sent(queues, Path(f"/proc/{host.pid}/net/dev").read_text())

    before = sent(first)
    receiver = subprocess.Popen(
        second.command(sys.executable, "-c", RECEIVE), stdout=subprocess.PIPE, text=True
    )
    send = first.command(sys.executable, "-c", SEND, second.address, str(num_bytes))
    subprocess.run(send, check=True, timeout=30)
    elapsed_s = float(receiver.communicate(timeout=30)[0])
    moved = sent(first) - before
    assert moved.wire_bytes == pytest.approx(on_cable(num_bytes, 0), rel=0.03)
    assert moved.interface_bytes == pytest.approx(num_bytes, rel=0.03)
    assert num_bytes * 8 / elapsed_s < 1.1 * 0.4e9  # a busy machine is slower, none is faster


HOLD = """
import sys, time
sys.path.insert(0, sys.argv[1])
import testbed
with testbed.TwoHosts(testbed.Profile(1)) as bed:
    print(*(host.pid for host in bed.hosts), flush=True)
    time.sleep(60)
"""


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda n: n.name)
def test_nothing_is_left_of_a_benchmark_that_is_killed(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(BENCHMARKS)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2 and all(testbed.start_of(pid) for pid in pids)
    process.send_signal(number)
    process.wait(20)
    process.stdout.close()
    end = time.monotonic() + 10
    while any(testbed.start_of(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(testbed.start_of(pid) for pid in pids)
    assert testbed.leftovers() == []


@needs_hosts
@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--quick", "--layouts", "2x1", "--gbit", "10", "--json", str(file)]
    names = ("shardwise full", "shardwise hybrid", "shardwise full int8")
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "two_hosts.py", *words, "--engines", ",".join(names)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert json.loads(file.read_text()) == result
    profile = result["layouts"]["2x1"]["profiles"]["10 Gbit/s"]
    full, hybrid, int8 = (profile["rows"][name] for name in names)
    assert profile["problems"] == [] and full["loss"] == pytest.approx(hybrid["loss"], rel=1e-5)
    # Two gathers and an all-reduce against one: half, less the root's second gather.
    assert 0.4 < hybrid["wire_bytes"][0] / full["wire_bytes"][0] < 0.6
    # A quarter of each gather, and an all-to-all for an all-reduce: 3/16; a tiny step has more.
    assert 0.15 < int8["wire_bytes"][0] / full["wire_bytes"][0] < 0.3
