"""Devices by name, or by a file that `shardwise doctor` wrote: memory, speed, links.

Memory is the vendor's figure with 1 GB = 10**9 bytes; what a device really offers is some percent
more (its gigabytes are binary), about what the driver's context and the allocator's rest take.
Speeds are the vendor's peaks, for dense matrices: what of these a training step reaches is fitted
(`plan.published`). Sources: NVIDIA's data sheets of A100, H100, H200, L40S and B200 (HGX), its
architecture papers of Ampere, Ada and Blackwell GeForce (GA102, AD102, GB202), DGX Spark's page;
AMD's data sheet of MI300X; read in 2026.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from shardwise.units import parse_size


@dataclass(frozen=True, slots=True)
class Device:
    """`flops` a second by dtype; bytes a second of memory, of the link to the devices of its host
    (one way), and of its share of the host's network.
    """

    memory: str
    name: str
    bandwidth: float
    float32: float
    bfloat16: float
    float8: float
    link: float
    network: float

    def flops(self, dtype: str) -> float:
        return {"bfloat16": self.bfloat16, "float16": self.bfloat16, "float8": self.float8}.get(
            dtype, self.float32
        )


def _device(
    memory: str, name: str, bandwidth: float, teraflops: tuple[float, float, float],
    link: float, network: float,
) -> Device:  # fmt: skip
    """Bandwidths in GB/s; teraflops in float32, bfloat16 (sums in float32) and float8."""
    float32, bfloat16, float8 = (1e12 * t for t in teraflops)
    return Device(
        memory, name, 1e9 * bandwidth, float32, bfloat16, float8, 1e9 * link, 1e9 * network
    )


# Without float8 the figure is that of bfloat16. Links: PCIe x16 or NVLink, one way; networks: one
# port of 400 Gbit/s for each device in the usual host of eight, 200 for gb10, 10 for cards of
# workstations.
DEVICES: dict[str, Device] = {
    "3090": _device("24GB", "NVIDIA GeForce RTX 3090", 936, (35.6, 71, 71), 32, 1.25),
    "4090": _device("24GB", "NVIDIA GeForce RTX 4090", 1008, (82.6, 165, 330), 32, 1.25),
    "5090": _device("32GB", "NVIDIA GeForce RTX 5090", 1792, (104.8, 209.5, 419), 64, 1.25),
    "l40s": _device("48GB", "NVIDIA L40S", 864, (91.6, 362, 733), 32, 25),
    "a100-40": _device("40GB", "NVIDIA A100 40GB", 1555, (19.5, 312, 312), 300, 25),
    "a100": _device("80GB", "NVIDIA A100 80GB", 2039, (19.5, 312, 312), 300, 25),
    "h100": _device("80GB", "NVIDIA H100 SXM", 3350, (67, 989, 1979), 450, 50),
    "h200": _device("141GB", "NVIDIA H200", 4800, (67, 989, 1979), 450, 50),
    "b200": _device("180GB", "NVIDIA B200", 7700, (75, 2250, 4500), 900, 50),
    "gb10": _device("128GB", "NVIDIA GB10, shared with the CPU", 273, (31, 125, 250), 25, 25),
    "mi300x": _device("192GB", "AMD Instinct MI300X", 5300, (163.4, 1307, 2615), 448, 50),
}
# What `--link` takes: bytes a second one way, and what a collective takes however small it is.
LINKS: dict[str, tuple[float, float]] = {
    "pcie3": (16e9, 15e-6),
    "pcie4": (32e9, 15e-6),
    "pcie5": (64e9, 15e-6),
    "nvlink": (450e9, 15e-6),
    "10g": (1.25e9, 50e-6),
    "25g": (3.125e9, 50e-6),
    "100g": (12.5e9, 30e-6),
    "200g": (25e9, 20e-6),
    "400g": (50e9, 20e-6),
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


def device_named(gpus: str | None, hardware: str | None) -> Device | None:
    """Of "8xh100" or of a name; None where only memory is known."""
    match = _GPUS.fullmatch((gpus or "").strip().lower())
    name = match[2] if match is not None and match[2] else (hardware or "").lower()
    return DEVICES.get(name)


def parse_link(text: str) -> tuple[float, float]:
    """Bytes a second and seconds of latency of "pcie4", "25G", or a number of GB/s.

    Raises:
        ValueError: it is neither.
    """
    name = text.strip().lower()
    if name in LINKS:
        return LINKS[name]
    try:
        speed = float(name.removesuffix("gb/s")) * 1e9
    except ValueError:
        speed = 0.0
    if not 1e6 <= speed <= 1e15:
        raise ValueError(f"{text!r}: expected one of {', '.join(LINKS)}, or GB/s like 12.5")
    return speed, 20e-6


def memory_of(text: str) -> int:
    """Bytes of "24GB", "h100".

    Raises:
        ValueError: it is no size and no device that is known.
    """
    name = text.strip().lower()
    size = parse_size(DEVICES[name].memory if name in DEVICES else name)
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
