"""The device that everything runs on: the only file here that knows CUDA from others.

    Device("cuda")   NCCL
    Device("sim")    the simulated device of tests/simulated_device
    Device("cpu")    Gloo; `--dry`

What a kind of device does not have is None: peaks of memory on a CPU, facts of a driver.
Names are those of `torch.cuda`, which modules of other accelerators share
(https://docs.pytorch.org/docs/stable/generated/torch.get_device_module.html).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parents[2] / "tests"
BACKENDS = {
    "cuda": "cpu:gloo,cuda:nccl",
    "sim": "cpu:gloo,sim:simccl",
    "cpu": "gloo",
}
KINDS = tuple(BACKENDS)
MAX_RANKS = 8
_RACES: list[str] = []  # seen before the simulated device was told to count anew


def _simulated() -> Any:
    return importlib.import_module("simulated_device")


@dataclass(frozen=True, slots=True)
class Device:
    """One kind, and this rank's index of it."""

    kind: str
    index: int = 0

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def is_accelerator(self) -> bool:
        return self.kind != "cpu"

    @property
    def module(self) -> Any:
        """`torch.cuda`, or what stands in its place."""
        return torch.cuda if self.is_cuda else torch.get_device_module(self.kind)

    @property
    def place(self) -> torch.device:
        return torch.device(self.kind, self.index) if self.is_accelerator else torch.device("cpu")

    @property
    def has_fused_adamw(self) -> bool:
        return self.kind != "sim"

    # -- processes -------------------------------------------------------------------------------
    def load(self) -> None:
        """Make torch know the device."""
        if self.kind == "sim":
            _simulated().load()

    def count(self) -> int:
        """How many ranks a machine can have; 2 where ranks share a device."""
        if not self.is_cuda:
            return 2
        return min(MAX_RANKS, torch.cuda.device_count())

    def why_not(self) -> str:
        """Why it cannot be used here; empty where it can."""
        if self.is_cuda and not torch.cuda.is_available():
            return (
                "torch sees no CUDA GPU here (torch.cuda.is_available() is False); --dry runs "
                "everything on the CPU"
            )
        if self.kind == "sim":
            return _simulated().why_not() or ""
        return ""

    def join(self, rank: int, world: int, meeting: str) -> None:
        """This process becomes a rank; `meeting` is the path of a file that is not there yet."""
        if self.is_accelerator:
            self.module.set_device(self.index)
        options: dict[str, Any] = {"device_id": self.place} if self.is_cuda else {}
        dist.init_process_group(
            BACKENDS[self.kind], init_method=f"file://{meeting}", rank=rank, world_size=world,
            **options,
        )  # fmt: skip

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.is_accelerator:
            self.module.synchronize()

    # -- memory ----------------------------------------------------------------------------------
    def free_bytes(self) -> int | None:
        """What is left of the device's memory, or of the host's."""
        return torch.cuda.mem_get_info(self.index)[0] if self.is_cuda else None

    def start_peaks(self) -> None:
        """Give back what is cached, and count peaks from here on."""
        gc.collect()
        self.synchronize()
        if self.is_accelerator:
            self.module.empty_cache()
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.index)
        elif self.kind == "sim":
            _RACES.extend(_simulated().report().races)
            _simulated().clear()

    def peaks(self) -> dict[str, int] | None:
        """Bytes since `start_peaks`."""
        if not self.is_accelerator:
            return None
        reserved = getattr(self.module, "max_memory_reserved", self.module.memory_reserved)
        return {
            "allocated_peak_bytes": self.module.max_memory_allocated(),
            "reserved_peak_bytes": reserved(),
        }

    def reserved_bytes(self) -> int | None:
        return self.module.memory_reserved() if self.is_accelerator else None

    def reserved_by_stream(self) -> dict[str, int] | None:
        """Bytes of segments in a snapshot of the allocator, by stream; the default one is 0."""
        if self.kind == "sim":
            return {name: pool.reserved for name, pool in _simulated().report().pools.items()}
        if not self.is_cuda:
            return None
        found: dict[str, int] = {}
        for segment in torch.cuda.memory_snapshot():
            if segment.get("device", self.index) == self.index:
                name = str(segment["stream"])
                found[name] = found.get(name, 0) + segment["total_size"]
        return found

    def take_races(self) -> list[str] | None:
        """Unordered accesses since the last call; only the simulated device sees them."""
        if self.kind != "sim":
            return None
        self.synchronize()
        found = [*_RACES, *_simulated().report().races]
        _RACES.clear()
        _simulated().clear()
        return found

    @contextlib.contextmanager
    def memory_history(self, path: Path | None) -> Iterator[None]:
        """Write a snapshot with its history, for https://pytorch.org/memory_viz."""
        if not self.is_cuda or path is None:
            yield
            return
        torch.cuda.memory._record_memory_history()
        try:
            yield
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    # -- what only CUDA has ----------------------------------------------------------------------
    def profiled(self) -> list[Any]:
        """What the profiler has to look at."""
        activities = torch.profiler.ProfilerActivity
        return [activities.CPU, activities.CUDA] if self.is_cuda else [activities.CPU]

    def facts(self) -> dict[str, Any]:
        """Names and versions."""
        if not self.is_cuda:
            return {"kind": self.kind}
        found = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found.append(
                {
                    "name": properties.name,
                    "memory_bytes": properties.total_memory,
                    "capability": f"{properties.major}.{properties.minor}",
                    "reaches": [
                        other
                        for other in range(torch.cuda.device_count())
                        if other != index and torch.cuda.can_device_access_peer(index, other)
                    ],
                }
            )
        return {
            "kind": self.kind,
            "devices": found,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "settings": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(("NCCL_", "CUDA_", "PYTORCH_", "TORCH_NCCL_"))
            },
        }
