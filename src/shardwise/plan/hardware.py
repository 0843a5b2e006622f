"""Devices by name, or by a file that `shardwise doctor` wrote: how much memory they have.

Memory is the vendor's figure with 1 GB = 10**9 bytes; what a device really offers is some percent
more (its gigabytes are binary), about what the driver's context and the allocator's rest take.
Sources: the product pages of NVIDIA and AMD, 2026.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from shardwise.units import parse_size

# Name as people write it -> (memory of one device, as the vendor calls it).
DEVICES: dict[str, tuple[str, str]] = {
    "3090": ("24GB", "NVIDIA GeForce RTX 3090"),
    "4090": ("24GB", "NVIDIA GeForce RTX 4090"),
    "5090": ("32GB", "NVIDIA GeForce RTX 5090"),
    "l40s": ("48GB", "NVIDIA L40S"),
    "a100-40": ("40GB", "NVIDIA A100 40GB"),
    "a100": ("80GB", "NVIDIA A100 80GB"),
    "h100": ("80GB", "NVIDIA H100 SXM"),
    "h200": ("141GB", "NVIDIA H200"),
    "b200": ("180GB", "NVIDIA B200"),
    "gb10": ("128GB", "NVIDIA GB10, shared with the CPU"),
    "mi300x": ("192GB", "AMD Instinct MI300X"),
}
_GPUS = re.compile(r"(\d+)(?:x(.+))?")


def parse_gpus(text: str) -> tuple[int, int | None]:
    """Ranks and bytes of each: "8", "2x24GB", "64xh100".

    Raises:
        ValueError: it is neither, or names a device that is not known.
    """
    match = _GPUS.fullmatch(text.strip().lower())
    if match is None or int(match[1]) < 1:
        raise ValueError(f"{text!r}: expected a number of devices, 8, or with memory, 2x24GB")
    return int(match[1]), None if match[2] is None else memory_of(match[2])


def memory_of(text: str) -> int:
    """Bytes of "24GB", "h100".

    Raises:
        ValueError: it is no size and no device that is known.
    """
    name = text.strip().lower()
    size = parse_size(DEVICES[name][0] if name in DEVICES else name)
    if not size or (name.isdecimal() and name not in DEVICES):
        raise ValueError(f"{text!r}: no size, and no device of {', '.join(DEVICES)}")
    return size


def read_hardware(path: Path) -> tuple[str, int, int]:
    """Kind of device ("cuda", or "cpu": one memory that ranks share), their number, bytes of each.

    Raises:
        ValueError: it is no hardware file.
    """
    try:
        found = tomllib.loads(path.read_text()).get("device")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no TOML: {error}") from None
    device = found if isinstance(found, dict) else {}
    kind, count, memory = (device.get(key) for key in ("kind", "count", "memory"))
    numbers = [n for n in (count, memory) if type(n) is int and n > 0]
    if kind not in ("cpu", "cuda") or len(numbers) < 2:
        raise ValueError(
            f"{path}: no hardware file (its [device] must have kind, count and memory); write one "
            f"by: shardwise doctor --save hardware.toml"
        )
    return str(kind), numbers[0], numbers[1]
