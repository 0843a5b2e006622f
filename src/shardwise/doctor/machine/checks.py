"""What of a machine will be in a job's way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from shardwise.doctor.finding import COSTS, HINT, WRONG, Finding, sorted_findings
from shardwise.doctor.machine.gpus import Gpu
from shardwise.doctor.machine.host import Host
from shardwise.units import text_of_bytes

_LITTLE_SHM = 2**30
_LITTLE_DISK = 2 * 2**30
_SLOWING = {  # variables that switch a faster way off
    "NCCL_P2P_DISABLE": "GPUs copy through the host",
    "NCCL_IB_DISABLE": "hosts talk over sockets, not InfiniBand",
    "NCCL_SHM_DISABLE": "ranks of one host talk over the network",
}


def examine(
    host: Host,
    gpus: Sequence[Gpu],
    no_p2p: Sequence[tuple[int, int]],
    folder: Path,
    *,
    torch_sees: int,
) -> list[Finding]:
    """Findings, the heaviest first. `torch_sees`: GPUs that torch can use."""
    found = [
        *_devices(gpus, no_p2p, torch_sees, host),
        *_cores(host),
        *_memory(host, bool(gpus)),
        *_disk(host, folder),
    ]
    return sorted_findings(found)


def _devices(
    gpus: Sequence[Gpu], no_p2p: Sequence[tuple[int, int]], torch_sees: int, host: Host
) -> Iterator[Finding]:
    hides = "CUDA_VISIBLE_DEVICES" in host.environment
    if gpus and not torch_sees and not hides:
        yield Finding(
            WRONG,
            "torch-sees-no-gpu",
            "torch does not see the GPUs",
            f"nvidia-smi lists {len(gpus)} ({gpus[0].name}), torch.cuda.device_count() is 0; torch "
            f"{host.versions.get('torch', '?')}",
            "jobs would run on the CPU: this torch was built without CUDA, or for a newer driver",
            "pip install torch --index-url https://download.pytorch.org/whl/cu126",
        )
    for number, gpu in enumerate(gpus):
        if gpu.power_limit and gpu.power_default and gpu.power_limit < 0.9 * gpu.power_default:
            yield Finding(
                COSTS,
                "power-cap",
                f"GPU {number} has a power cap",
                f"nvidia-smi: power.limit {gpu.power_limit:g} W, by default {gpu.power_default:g} "
                f"W ({gpu.name})",
                "it computes slower than others of its kind, and all ranks wait for the slowest",
                f"nvidia-smi -i {number} -pl {gpu.power_default:g}",
            )
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            yield Finding(
                COSTS,
                "pcie-width",
                f"GPU {number} uses fewer PCIe lanes than it has",
                f"nvidia-smi: x{gpu.pcie_width} of x{gpu.pcie_width_max} ({gpu.name})",
                "copies to the host, and between GPUs without NVLink, have a part of the bandwidth",
                "# look at the slot and the riser; lspci -vv says LnkSta",
            )
    if no_p2p:
        pairs = ", ".join(f"{a}-{b}" for a, b in no_p2p[:8])
        yield Finding(
            HINT,
            "no-p2p",
            "GPUs cannot read each other's memory",
            f"torch.cuda.can_device_access_peer: no for {pairs}",
            "collectives go through the host's memory; usual for GeForce, else an IOMMU setting",
            'shard.strategy = "shard_grad_op"   # gathers once a step, where memory allows it',
        )
    for name, effect in _SLOWING.items():
        if gpus and host.environment.get(name, "0") not in ("", "0"):
            yield Finding(
                COSTS,
                name.lower().replace("_", "-"),
                f"{name} is set",
                f"environment: {name}={host.environment[name]}",
                effect,
                f"unset {name}",
            )


def _cores(host: Host) -> Iterator[Finding]:
    quota, threads = host.cpu_quota, host.environment.get("OMP_NUM_THREADS", "")
    if quota and quota < 0.95 * host.cores:
        yield Finding(
            COSTS,
            "cpu-quota",
            "the container may use fewer cores than it sees",
            f"cgroup: {quota:g} cores at a time, {host.cores} are seen",
            "ranks start a thread for each core that they see, and are stopped part of the time",
            f"run.threads = 1   # with {max(1, int(quota))} ranks on this machine",
        )
    if threads.isdecimal() and int(threads) > host.cores:
        yield Finding(
            COSTS,
            "omp-threads",
            "OMP_NUM_THREADS is more than there are cores",
            f"environment: OMP_NUM_THREADS={threads}; {host.cores} cores",
            "threads take turns, and each collective waits for the last one",
            "unset OMP_NUM_THREADS   # jobs set cores / ranks",
        )
    if host.load > 1.5 * host.cores:
        yield Finding(
            HINT,
            "busy",
            "the machine is busy",
            f"load {host.load:.1f} on {host.cores} cores (mean of a minute)",
            "jobs share the cores with other programs; what is measured now is too slow",
            "top -o %CPU   # shows who",
        )
    if host.numa_nodes > 1:
        yield Finding(
            HINT,
            "numa",
            "memory lies on several nodes",
            f"/sys/devices/system/node: {host.numa_nodes} NUMA nodes",
            "a rank whose threads wander reads memory of the other node, at about half the speed",
            "numactl --cpunodebind=0 --membind=0 torchrun script.py   # jobs do it (run.numa)",
        )


def _memory(host: Host, has_gpu: bool) -> Iterator[Finding]:
    room = min(host.memory, host.memory_limit or host.memory)
    if host.memory_available < 0.1 * host.memory:
        yield Finding(
            COSTS,
            "memory-taken",
            "hardly any memory is left",
            f"/proc/meminfo: {text_of_bytes(host.memory_available)} of "
            f"{text_of_bytes(host.memory)} available",
            "the kernel ends processes when there is none (exit code -9)",
            "top -o %MEM   # shows who has it",
        )
    if host.shm is not None and host.shm < min(_LITTLE_SHM, room // 4):
        yield Finding(
            COSTS if has_gpu else HINT,
            "small-shm",
            "/dev/shm is small",
            f"/dev/shm: {text_of_bytes(host.shm)}, {text_of_bytes(host.shm_free or 0)} free",
            "NCCL's buffers and copies in memory (checkpoint.memory_every) lie there; containers "
            "have 64 MiB by default",
            "docker run --shm-size=8g ...   # or --ipc=host",
        )


def _disk(host: Host, folder: Path) -> Iterator[Finding]:
    if host.disk_free < min(_LITTLE_DISK, host.disk // 10):
        yield Finding(
            COSTS,
            "disk-full",
            "the disk of the run folder is nearly full",
            f"{folder}: {text_of_bytes(host.disk_free)} of {text_of_bytes(host.disk)} free",
            "a checkpoint that has no room ends the job at its first step",
            'run.dir = "/another/disk/run"',
        )
