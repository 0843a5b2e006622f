"""A machine on the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from shardwise.doctor.machine.gpus import Gpu
from shardwise.doctor.machine.host import Host
from shardwise.units import counted, text_of_bytes

if TYPE_CHECKING:
    from shardwise.doctor.machine.bandwidth import Measured


def print_machine(
    console: Console, host: Host, gpus: Sequence[Gpu], measured: Measured | None
) -> None:
    quota = "" if host.cpu_quota is None else f", {host.cpu_quota:g} of them at a time (cgroup)"
    limit = "" if host.memory_limit is None else f", limit {text_of_bytes(host.memory_limit)}"
    shm = "none"
    if host.shm is not None:
        shm = f"{text_of_bytes(host.shm)}, {text_of_bytes(host.shm_free or 0)} free"
    locked = "no limit" if host.locked_memory is None else text_of_bytes(host.locked_memory)
    lines = {
        "versions": ", ".join(f"{name} {version}" for name, version in host.versions.items()),
        "cores": f"{host.cores}{quota}; load {host.load:.1f}",
        "memory": f"{text_of_bytes(host.memory)}, "
        f"{text_of_bytes(host.memory_available)} available{limit}",
        "/dev/shm": f"{shm}; memory that may be locked: {locked}",
        "numa nodes": str(host.numa_nodes or "not known"),
        "disk": f"{text_of_bytes(host.disk)}, {text_of_bytes(host.disk_free)} free",
        "environment": ", ".join(f"{k}={v}" for k, v in host.environment.items()) or "-",
        "gpus": "none" if not gpus else counted(len(gpus), "GPU"),
    }
    for number, gpu in enumerate(gpus):
        width = f", PCIe x{gpu.pcie_width} of x{gpu.pcie_width_max}" if gpu.pcie_width else ""
        power = f", {gpu.power_limit:g} W" if gpu.power_limit else ""
        free = f"{text_of_bytes(gpu.memory)}, {text_of_bytes(gpu.memory_free)} free"
        lines[f"gpu {number}"] = f"{gpu.name}, {free}{power}{width}"
    if measured is not None:
        lines["copy"] = f"{measured.copy / 1e9:.1f} GB/s in memory, one thread"
        lines["disk write"] = f"{measured.disk_write / 1e9:.2f} GB/s, synced"
        compute = measured.compute
        beside = (
            f"{counted(compute.ranks, 'rank')} side by side, {counted(compute.threads, 'thread')}"
        )
        for dtype in ("float32", "bfloat16"):
            for kind, unit in (("product", "GFLOP/s"), ("attention", "GFLOP/s"),
                               ("elementwise", "GB/s")):  # fmt: skip
                rates = [t.amount / t.seconds / 1e9 for t in compute.operators
                         if (t.kind, t.dtype) == (kind, dtype)]  # fmt: skip
                lines[f"{kind} {dtype}"] = f"{max(rates):.1f} {unit} a rank at most; {beside}"
        for each in measured.collectives:
            rate = each.size_bytes / each.seconds / 1e9
            name = f"{each.kind} {text_of_bytes(each.size_bytes)}"
            said = f"{each.seconds * 1e3:.2f} ms ({rate:.1f} GB/s) by {each.transport}"
            lines[name] = f"{lines[name]}; {said}" if name in lines else said
    width = max(map(len, lines))
    for name, text in lines.items():
        console.print(f"{name:<{width}}  {text}", markup=False, soft_wrap=True)
