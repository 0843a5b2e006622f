"""What the kernel says of this machine: memory, cores, limits, shared memory, disks, versions.

All paths are below `root`, so that a test can show another machine. What a kernel does not tell is
None and never guessed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_NO_LIMIT = 2**60  # version 1 of cgroups writes a number near 2**63 for none


@dataclass(frozen=True, slots=True)
class Host:
    """Sizes in bytes."""

    versions: dict[str, str]
    cores: int
    cpu_quota: float | None  # cores that the cgroup may use at a time
    load: float
    memory: int
    memory_available: int
    memory_limit: int | None  # of the cgroup
    shm: int | None
    shm_free: int | None
    locked_memory: int | None  # None: no limit
    numa_nodes: int
    disk: int
    disk_free: int
    environment: dict[str, str]


def look(folder: Path, root: Path = Path("/")) -> Host:
    """Of this machine, and of the disk that `folder` will lie on."""
    disk = shutil.disk_usage(_existing(folder))
    shm = _usage(root / "dev/shm")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        versions=_versions(),
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        cpu_quota=_cpu_quota(root),
        load=os.getloadavg()[0],
        memory=_meminfo(root, "MemTotal"),
        memory_available=_meminfo(root, "MemAvailable"),
        memory_limit=_memory_limit(root),
        shm=shm and shm[0],
        shm_free=shm and shm[1],
        locked_memory=None if soft == resource.RLIM_INFINITY else soft,
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))),
        disk=disk.total,
        disk_free=disk.free,
        environment={k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    )


_VARIABLES = ("OMP_NUM_THREADS", "NCCL_", "GLOO_", "CUDA_VISIBLE", "TORCH_NCCL", "SHARDWISE_")


def _existing(folder: Path) -> Path:
    folder = folder.resolve()
    while not folder.exists():
        folder = folder.parent
    return folder


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in ("torch", "shardwise", "transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _usage(path: Path) -> tuple[int, int] | None:
    try:
        found = shutil.disk_usage(path)
    except OSError:
        return None
    return found.total, found.free


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _meminfo(root: Path, field: str) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _groups(root: Path) -> dict[str, str]:
    """Controller -> path of this process in its hierarchy; "" is version 2."""
    found = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path.lstrip("/")
    return found


def _smallest(root: Path, controller: str, name: str, name_of_v1: str) -> float | None:
    """Of the limits of a group and all above it."""
    base, groups = root / "sys/fs/cgroup", _groups(root)
    places = [(base, groups.get("", ""), name)]
    places.append((base / controller, groups.get(controller, ""), name_of_v1))
    found: list[float] = []
    for top, path, file in places:
        folder = top / path
        while True:
            found += _limit(folder, file)
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent
    return min(found, default=None)


def _limit(folder: Path, file: str) -> list[float]:
    words = _text(folder / file).split()
    if not words or not words[0].isdecimal():
        return []  # "max", -1
    if file == "cpu.max":
        return [int(words[0]) / int(words[1])]
    if file == "cpu.cfs_quota_us":
        period = _text(folder / "cpu.cfs_period_us").strip()
        return [int(words[0]) / int(period)] if period.isdecimal() else []
    return [float(words[0])] if int(words[0]) < _NO_LIMIT else []


def _cpu_quota(root: Path) -> float | None:
    return _smallest(root, "cpu", "cpu.max", "cpu.cfs_quota_us")


def _memory_limit(root: Path) -> int | None:
    found = _smallest(root, "memory", "memory.max", "memory.limit_in_bytes")
    return None if found is None else int(found)
