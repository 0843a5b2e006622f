"""How fast this machine moves bytes: copies in memory, writes to a disk, collectives of two ranks.

Each figure is the best of some repetitions: what the machine can do, not what else was running.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError

_COPIED = 2**28
_WRITTEN = 2**27
SIZES = (2**16, 2**20, 2**24, 2**26)
_REPEATS = 5
_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of two ranks on this host; `size_bytes` is the whole."""

    transport: str
    kind: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes per second, and collectives."""

    copy: float
    disk_write: float
    collectives: tuple[Collective, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(folder: Path) -> Measured:
    """Takes some seconds; writes to `folder` and takes it away again."""
    return Measured(copy_bandwidth(), disk_bandwidth(folder), tuple(collectives()))


def _best(action: Callable[[], object], repeats: int = _REPEATS) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def copy_bandwidth() -> float:
    """Of memory, by one thread: bytes that are copied in a second."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source = torch.ones(_COPIED, dtype=torch.uint8)
        target = torch.empty_like(source)
        target.copy_(source)
        return _COPIED / _best(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(before)


def disk_bandwidth(folder: Path) -> float:
    """Of one file that is written and synced."""
    data = os.urandom(2**20)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shardwise-doctor-") as file:

            def write() -> None:
                file.seek(0)
                for _ in range(_WRITTEN // len(data)):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())

            return _WRITTEN / _best(write, 2)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None


def collectives() -> list[Collective]:
    """On two ranks, each with one thread: gathers of a unit by each transport, and what Gloo's
    reduce-scatter takes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as folder:
        meeting = str(Path(folder) / "meeting")
        args = [(rank, meeting, theirs) for rank in range(2)]
        processes = [context.Process(target=_rank, args=each, daemon=True) for each in args]
        for process in processes:
            process.start()
        theirs.close()
        try:
            found = ours.recv() if ours.poll(_TIMEOUT_S) else None
        except EOFError:
            found = None
        for process in processes:
            process.join(5.0 if found else 0.1)
            process.kill()
    if not isinstance(found, list):
        raise ConfigError(f"two ranks cannot talk to each other on this host: {found or 'no word'}")
    return [Collective(*each) for each in found]


def _rank(rank: int, meeting: str, pipe: Any) -> None:
    """The target of a process."""
    import torch
    import torch.distributed as dist

    from shardwise.train.meeting import stay_on_loopback

    try:
        stay_on_loopback()
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        found = [(name, "gather", size, _gather_s(name, size))
                 for name in ("shared_memory", "c10d") for size in SIZES]  # fmt: skip
        found += [("c10d", "reduce", size, _reduce_s(size)) for size in SIZES]
        if rank == 0:
            pipe.send(found)
        dist.barrier()
    except Exception as error:  # noqa: BLE001 - told by the parent
        if rank == 0:
            pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _gather_s(transport: str, size: int) -> float:
    """Of a unit of one matrix, as a job gathers it."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from shardwise.engine.services.shard_model import shard_model

    torch.manual_seed(0)  # the same on both
    model = nn.Linear(256, size // 1024, bias=False)
    shard_model(
        model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)),
        strategy="full_shard", unit="auto", transport=transport,
    )  # fmt: skip
    unit: Any = model
    times = []
    for _ in range(_REPEATS):
        dist.barrier()
        began = time.perf_counter()
        unit.unshard()
        times.append(time.perf_counter() - began)
        unit.reshard()
    return min(times)


def _reduce_s(size: int) -> float:
    import torch
    import torch.distributed as dist

    whole, own = torch.ones(size // 4), torch.empty(size // 8)
    dist.reduce_scatter_single(own, whole)

    def reduce() -> None:
        dist.reduce_scatter_single(own, whole)

    return _best(reduce)
