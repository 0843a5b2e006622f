"""How many bytes a rank may still take: of its GPU, or its share of what the host has."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def room_on(device: torch.device) -> int:
    """Bytes that one rank may still take: of its device, or its share of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return min(_available(), _left_in_group()) // ranks_here


def _available() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**63


def _left_in_group() -> int:
    """Of the memory that a container may use, page cache left out."""
    group = Path("/sys/fs/cgroup")
    limit = next(iter(_lines(group / "memory.max")), "max")
    used = [line.split()[1] for line in _lines(group / "memory.stat") if line.startswith("anon ")]
    return int(limit) - int(used[0]) if limit.isdecimal() and used else 2**63


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
