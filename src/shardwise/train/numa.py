"""Which cores a rank runs on, where a host's memory lies on several nodes (NUMA).

A rank whose threads wander reads memory of another node, at about half the speed. So each keeps to
the cores of one node: that of its GPU, as the PCI bus has it; without GPUs ranks are dealt over the
nodes in blocks, ranks 0 and 1 of 4 to the first of 2. Linux gives a thread memory of the node that
it runs on, so memory follows: staging, offloaded state, batches.

Nothing is done where there is one node, where somebody has bound the process already (`numactl`,
`taskset`, a container with the cores of one node), or where a node has none of the allowed cores.
"""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch

ROOT = Path("/")


def nodes(root: Path = ROOT) -> dict[int, frozenset[int]]:
    """The cores of each node that has some, by its number."""
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        try:
            cores = parse_cores((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return dict(sorted(found.items()))


def parse_cores(text: str) -> frozenset[int]:
    """ "0-3,8" -> 0, 1, 2, 3, 8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def node_of(device: torch.device, root: Path = ROOT) -> int | None:
    """The node that a GPU is at; None where nobody says so."""
    if device.type != "cuda":
        return None
    about: Any = torch.cuda.get_device_properties(device)
    if not hasattr(about, "pci_device_id"):  # of an older torch
        return None
    place = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
    try:
        node = int((root / "sys/bus/pci/devices" / place / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware says nothing


def cores_for(
    local_rank: int,
    num_local: int,
    allowed: Set[int],
    known: dict[int, frozenset[int]],
    node: int | None,
) -> frozenset[int] | None:
    """The cores that a rank is to keep to; None: leave it as it is. `node`: of its GPU."""
    usable = {number: cores & allowed for number, cores in known.items() if cores & allowed}
    if len(usable) < 2 or num_local < 1:
        return None
    if node is None:
        node = list(usable)[local_rank % num_local * len(usable) // num_local]
    return usable.get(node)


def bind(device: torch.device, root: Path = ROOT) -> frozenset[int] | None:
    """Keep this process, and the threads that it makes from now on, to one node: its cores, or None
    where nothing was done.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    cores = cores_for(
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        os.sched_getaffinity(0),
        nodes(root),
        node_of(device, root),
    )
    if cores is not None:
        os.sched_setaffinity(0, cores)
    return cores
