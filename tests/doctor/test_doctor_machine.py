"""`shardwise doctor`: what a machine has, what is in the way, and the hardware file."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.doctor.finding import exit_code
from shardwise.doctor.machine.checks import examine
from shardwise.doctor.machine.gpus import Gpu, find_gpus, pairs_without_p2p
from shardwise.doctor.machine.host import Host, look
from shardwise.plan.hardware import read_hardware
from shardwise.plan.measured import read_rates

GIB = 2**30
HOST = Host(
    versions={"torch": "2.13.0"}, cores=8, cpu_quota=None, load=0.5, memory=32 * GIB,
    memory_available=24 * GIB, memory_limit=None, shm=16 * GIB, shm_free=16 * GIB,
    locked_memory=None, numa_nodes=1, disk=500 * GIB, disk_free=100 * GIB, environment={},
)  # fmt: skip
GPU = Gpu("NVIDIA H100", 80 * GIB, 79 * GIB, 700.0, 700.0, 5, 16, 16)


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_container_of_either_version(tmp_path: Path) -> None:
    """The smallest limit of a group and all above it counts; "max" and huge numbers are none."""
    meminfo = "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n"
    second = written(tmp_path / "v2", {
        "proc/meminfo": meminfo, "proc/self/cgroup": "0::/pod/job\n",
        "sys/fs/cgroup/pod/memory.max": "268435456\n", "sys/fs/cgroup/pod/job/memory.max": "max\n",
        "sys/fs/cgroup/pod/job/cpu.max": "150000 100000\n",
        "sys/devices/system/node/node0/x": "", "sys/devices/system/node/node1/x": "",
    })  # fmt: skip
    host = look(tmp_path / "not/there/yet", second)
    assert (host.memory, host.memory_available) == (GIB, GIB // 2)
    assert (host.memory_limit, host.cpu_quota, host.numa_nodes) == (2**28, 1.5, 2)
    assert host.shm is None and host.disk > 0
    first = written(tmp_path / "v1", {
        "proc/meminfo": meminfo, "proc/self/cgroup": "4:memory:/a\n1:cpu,cpuacct:/a\n0::/\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "400000\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    })  # fmt: skip
    host = look(tmp_path, first)
    assert (host.memory_limit, host.cpu_quota) == (None, 4.0)
    assert look(tmp_path, tmp_path / "nothing").memory == 0  # told by nobody


def test_what_the_driver_says() -> None:
    asked = []

    def answer(command: Any) -> str:
        asked.append(command)
        return (
            "NVIDIA H100 80GB HBM3, 81559, 81000, 500.00, 700.00, 5, 8, 16\n"
            "NVIDIA GB10, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]\n"
        )

    first, second = find_gpus(answer)
    assert asked[0][0] == "nvidia-smi"
    assert (first.name, first.memory) == ("NVIDIA H100 80GB HBM3", 81559 * 2**20)
    assert (first.power_limit, first.pcie_width, first.pcie_width_max) == (500.0, 8, 16)
    assert second.power_limit is None and second.pcie_width is None

    def missing(command: Any) -> str:
        raise FileNotFoundError("nvidia-smi")

    def broken(command: Any) -> str:
        raise subprocess.CalledProcessError(9, command)

    assert find_gpus(missing) == find_gpus(broken) == []


def test_pairs_of_devices() -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 3,
        can_device_access_peer=lambda a, b: {a, b} != {0, 2},
    )
    assert pairs_without_p2p(cuda) == [(0, 2)]
    assert pairs_without_p2p(SimpleNamespace(is_available=lambda: False)) == []


@pytest.mark.parametrize(
    ("changed", "gpus", "torch_sees", "name"),
    [
        ({"cpu_quota": 2.0}, [], 0, "cpu-quota"),
        ({"environment": {"OMP_NUM_THREADS": "64"}}, [], 0, "omp-threads"),
        ({"memory_available": GIB}, [], 0, "memory-taken"),
        ({"disk_free": GIB}, [], 0, "disk-full"),
        ({"shm": 2**26}, [GPU], 1, "small-shm"),
        ({"environment": {"NCCL_P2P_DISABLE": "1"}}, [GPU], 1, "nccl-p2p-disable"),
        ({}, [replace(GPU, power_limit=400.0)], 1, "power-cap"),
        ({}, [replace(GPU, pcie_width=4)], 1, "pcie-width"),
        ({"disk_free": GIB}, [GPU], 0, "torch-sees-no-gpu"),  # before what weighs less
    ],
)
def test_what_is_in_the_way(changed: Any, gpus: Any, torch_sees: int, name: str) -> None:
    found = examine(replace(HOST, **changed), gpus, [], Path("."), torch_sees=torch_sees)
    assert found[0].name == name and exit_code(found) == 1
    assert all(each.evidence and each.meaning and each.remedy for each in found)


def test_hints_do_not_fail() -> None:
    found = examine(
        replace(HOST, load=40.0, numa_nodes=2), [GPU, GPU], [(0, 1)], Path("."), torch_sees=2
    )
    assert {each.name for each in found} == {"busy", "numa", "no-p2p"} and exit_code(found) == 0
    assert examine(HOST, [GPU], [], Path("."), torch_sees=1) == []
    # Hidden on purpose, and NCCL's default said aloud.
    said = replace(HOST, environment={"CUDA_VISIBLE_DEVICES": "", "NCCL_IB_DISABLE": "0"})
    assert examine(said, [GPU], [], Path("."), torch_sees=0) == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_machine_is_measured_and_planned_for(tmp_path: Path, capsys) -> None:
    file = tmp_path / "hardware.toml"
    assert main(["doctor", "--save", str(file), "--dir", str(tmp_path / "runs"), "--json"]) in (
        0,
        1,
    )
    found = json.loads(capsys.readouterr().out)
    collectives = found["measured"]["collectives"]
    kinds = {(c["transport"], c["kind"]) for c in collectives}
    assert kinds == {
        (transport, kind)
        for transport in ("shared_memory", "c10d")
        for kind in ("gather", "reduce", "all_reduce")
    }
    assert all(c["seconds"] > 0 for c in collectives) and found["measured"]["copy"] > 1e8
    assert not list((tmp_path / "runs").iterdir())
    kind, _, memory = read_hardware(file)
    assert kind == ("cuda" if found["gpus"] else "cpu") and memory > 0
    assert main(["plan", "--params", "1e6", "--gpus", "4", "--hardware", str(file), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["room_bytes"] == (memory if found["gpus"] else memory // 4)
    if found["gpus"]:
        return
    rates = read_rates(file)
    assert rates is not None and (rates.ranks, rates.call_s > 0) == (2, True)
    measured = found["measured"]["compute"]["operators"]
    assert {kind for kind, _ in rates.operators} == {each["kind"] for each in measured}
    for each in measured:  # what was measured is what a plan reads off
        seconds = rates.operator_s(each["kind"], each["amount"], each["dtype"])
        assert seconds == pytest.approx(each["seconds"], rel=0.01), each
    job = ["--model.dim=64", "--model.layers=2", "--hardware", str(file), "--json"]
    assert main(["plan", *job]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert all(row["step_s"] > row["exposed_s"] > 0 for row in planned["rows"])
    assert "2 ranks" in planned["notes"][-1]


def test_hardware_by_name(capsys) -> None:
    arguments = ["plan", "--params", "1e6", "--hardware", "h100", "--gpus", "2", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["room_bytes"] == 80 * 10**9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["doctor", "{dir}/none"], "no such directory"),
        (["doctor", "{dir}"], "no config.toml"),
        (["doctor", "{dir}/job.toml"], "is no directory"),
        (["doctor", "a", "b"], "a second run directory"),
        (["doctor", "--save"], "needs a value"),
        (["doctor", "--save", "{dir}/job.toml"], "no hardware file; name another"),
        (["doctor", "--save", "{dir}/none/x.toml"], "lies in no directory"),
        (["doctor", "--fast"], "unknown option"),
        (["doctor", "--ranks", "2"], "goes with --save FILE"),
        (["doctor", "--save", "{dir}/x.toml", "--ranks", "1"], "expected a number from 2 to 64"),
        (["doctor", "{dir}", "--save", "x"], "is for the machine"),
        (["plan", "--params", "1e6", "--hardware", "{dir}/none"], "no such file"),
        (["plan", "--params", "1e6", "--hardware", "{dir}/job.toml"], "no hardware file"),
        (["plan", "--params", "1e6", "--gpus", "2xh100", "--hardware", "a100"], "a number alone"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys, arguments: list[str], said: str) -> None:
    (tmp_path / "job.toml").write_text("[train]\nsteps = 3\n")
    before = sorted(tmp_path.rglob("*"))
    assert main([word.format(dir=tmp_path) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
