"""Where and when a result was measured: processor, versions, commit, date, load."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]  # of a clone; elsewhere there is no commit to name


def describe() -> dict[str, Any]:
    """All facts, ready for JSON."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(_meminfo("MemTotal") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "shardwise": metadata.version("shardwise"),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_at_start": os.getloadavg()[0],
    }


def bf16_slowdown() -> float:
    """How many times longer a bf16 matrix product takes than one in fp32, on one thread.

    Below 2 where the CPU has bf16 instructions (or AVX-512); about 100 where torch falls back to a
    plain loop, which is then all that a bf16 step consists of.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    elapsed_s = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        _ = a @ b
        started_s = time.process_time()
        for _ in range(3):
            _ = a @ b
        elapsed_s.append(time.process_time() - started_s)
    torch.set_num_threads(before)
    return elapsed_s[1] / elapsed_s[0]


def available_bytes() -> int:
    return _meminfo("MemAvailable")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _commit() -> str:
    """Commit of the code that was measured; `+changes` when src or benchmarks differ from it."""
    if not (ROOT / "benchmarks" / "engine.py").exists():
        return "unknown"
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+changes" if changed else commit


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
