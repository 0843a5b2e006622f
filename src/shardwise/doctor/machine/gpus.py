"""GPUs as the driver tells of them: the one place that asks nvidia-smi and torch about devices.

Only a test with a recorded answer has run this; no GPU has.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_FIELDS = (
    "name", "memory.total", "memory.free", "power.limit", "power.default_limit",
    "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in bytes, power in watts; None: the driver does not say."""

    name: str
    memory: int
    memory_free: int
    power_limit: float | None
    power_default: float | None
    pcie_generation: int | None
    pcie_width: int | None
    pcie_width_max: int | None


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    return done.stdout


def find_gpus(run: Callable[[Sequence[str]], str] = _run) -> list[Gpu]:
    """Empty where there is no driver."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        lines = run(query).splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in lines:
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(_FIELDS):
            numbers = [_number(word) for word in words[1:]]
            memory, free, limit, default, generation, width, widest = numbers
            found.append(
                Gpu(
                    words[0],
                    int((memory or 0) * 2**20),
                    int((free or 0) * 2**20),
                    limit,
                    default,
                    _whole(generation),
                    _whole(width),
                    _whole(widest),
                )
            )
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def pairs_without_p2p(cuda: Any) -> list[tuple[int, int]]:
    """Pairs of devices that cannot read each other's memory; `cuda` is torch.cuda."""
    if not cuda.is_available():
        return []
    count = cuda.device_count()
    return [
        (a, b) for a in range(count) for b in range(a + 1, count)
        if not (cuda.can_device_access_peer(a, b) and cuda.can_device_access_peer(b, a))
    ]  # fmt: skip
