"""Which ranks share a host, and whether the mesh fits that.

A host is what the launcher calls a node (`GROUP_RANK`, which torchrun and Kubeflow set); under a
scheduler that tells none, all ranks with one host name. Under hybrid_shard the ranks of a host are
to share a copy of the model, so that gathers stay inside and only sums of shards go between hosts.

    4 hosts x 2 ranks   replicate = 4   [0 1] [2 3] [4 5] [6 7]   each copy on a host
                        replicate = 2   [0 1 2 3] [4 5 6 7]       whole hosts: if shard = 4 says it
    2 hosts x 3 ranks   replicate = 3   [0 1] [2 3] [4 5]         2 and 3 are on two hosts: refused
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.checkpoint.ranks import Ranks
from shardwise.train.config import HYBRID, Config, mesh_shape, resolved_strategy
from shardwise.units import counted

_SHOWN = 8  # hosts in one text


@dataclass(frozen=True, slots=True)
class Host:
    """A host of the job, and its ranks in order."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} ({_ranks_text(self.ranks)})"


def find_hosts(ranks: Ranks) -> tuple[Host, ...]:
    """All hosts of the job, by their lowest rank. A collective."""
    told = ranks.on_all(lambda: (os.environ.get("GROUP_RANK", ""), socket.gethostname()))
    return hosts_of(told)


def hosts_of(told: Sequence[tuple[str, str]]) -> tuple[Host, ...]:
    """From the node and host name of each rank. Nodes count only where every rank knows its own."""
    by_launcher = all(node for node, _ in told)
    members: dict[str, list[int]] = {}
    for rank, (node, name) in enumerate(told):
        members.setdefault(node if by_launcher else name, []).append(rank)
    names = {key: told[ranks[0]][1] for key, ranks in members.items()}
    several = len(set(names.values())) < len(names)
    return tuple(
        Host(f"{names[key]} node {key}" if by_launcher and several else names[key], tuple(ranks))
        for key, ranks in members.items()
    )


def host_problems(config: Config, hosts: Sequence[Host]) -> list[tuple[str, str]]:
    """What is wrong with the mesh on these hosts: (key, what to do) pairs."""
    strategy, inside = resolved_strategy(config), config.shard.host_ranks
    if len(hosts) == 1:
        return []
    host_of = {rank: host for host in hosts for rank in host.ranks}
    if inside > 1:
        for first in range(0, len(host_of), inside):
            members = range(first, min(first + inside, len(host_of)))
            if len(on := {host_of[rank]: None for rank in members}) > 1:
                text = f"{inside}, but {_ranks_text(members)} run on {_hosts_text([*on])}"
                return [("shard.host_ranks", f"{text}; name how many each host has")]
    if strategy not in HYBRID:
        return []
    replicas, size = mesh_shape(config, len(host_of))
    size *= config.mesh.tensor  # ranks of one copy follow each other
    for copy in range(replicas):
        members = range(copy * size, (copy + 1) * size)
        on = list(dict.fromkeys(host_of[rank] for rank in members))
        if len(on) == 1:
            continue
        is_whole = sum(len(host.ranks) for host in on) == size
        if is_whole and config.mesh.shard != -1:
            return []  # several hosts for each copy, and the configuration says so
        parts = [Host(h.name, tuple(r for r in h.ranks if r in members)) for h in on]
        text = (
            f"{counted(replicas, 'replica')} of {counted(size, 'rank')}: under {strategy} "
            f"{_ranks_text(members)} share a copy of the model, but run on {_hosts_text(parts)}"
        )
        return [("mesh.replicate", f"{text}; {_advice(hosts, size, is_whole)}")]
    return []


def _advice(hosts: Sequence[Host], size: int, is_whole: bool) -> str:
    per_host = len(hosts[0].ranks)
    if any(len(host.ranks) != per_host for host in hosts):
        sizes = ", ".join(str(len(host.ranks)) for host in hosts[:_SHOWN])
        return (
            f"hosts have unlike numbers of ranks ({sizes}): start as many on each, or use "
            "full_shard"
        )
    if any(host.ranks[-1] - host.ranks[0] >= per_host for host in hosts):
        return (
            "start the ranks host by host, so that those of a host follow each other (srun: "
            "--distribution=block)"
        )
    advice = f"use mesh.replicate = {len(hosts)}, a copy for each host"
    return f"{advice}, or mesh.shard = {size} to mean it" if is_whole else advice


def crosses_hosts(config: Config, hosts: Sequence[Host]) -> bool:
    """Whether ranks of several hosts gather from each other."""
    if len(hosts) == 1:
        return False
    strategy, world = resolved_strategy(config), sum(len(host.ranks) for host in hosts)
    if strategy == "no_shard":
        return False
    size = mesh_shape(config, world)[1] * config.mesh.tensor if strategy in HYBRID else world
    host_of = {rank: host.name for host in hosts for rank in host.ranks}
    return any(host_of[rank] != host_of[rank // size * size] for rank in host_of)


def describe_mesh(config: Config, hosts: Sequence[Host]) -> str:
    """A line for the start of a job; empty for ranks of one host without replicas."""
    strategy, world = resolved_strategy(config), sum(len(host.ranks) for host in hosts)
    tensor = config.mesh.tensor
    if len(hosts) == 1 and strategy not in HYBRID and tensor == 1:
        return ""
    replicas, size = mesh_shape(config, world)
    if strategy == "no_shard":
        replicas, size = replicas * size, 1
    mesh = f"{counted(replicas, 'replica')} x {counted(size, 'shard')}"
    mesh += f" x {tensor} tensor ranks" if tensor > 1 else ""
    if len(hosts) == 1:
        return f"mesh: {mesh} on one host"
    where = "between hosts" if crosses_hosts(config, hosts) else "inside hosts only"
    gathers = "" if size == 1 else f"; gathers {where}"
    host_of = {rank: host.name for host in hosts for rank in host.ranks}
    if any(host_of[rank] != host_of[rank // tensor * tensor] for rank in host_of):
        gathers += "; activations of every layer between hosts"
    return f"mesh: {mesh} on {_hosts_text(hosts)}{gathers}"


def _hosts_text(hosts: Sequence[Host]) -> str:
    shown = ", ".join(map(str, hosts[:_SHOWN]))
    more = f" and {len(hosts) - _SHOWN} more" if len(hosts) > _SHOWN else ""
    return f"{counted(len(hosts), 'host')}: {shown}{more}"


def _ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 0", "ranks 0-3", "ranks 0, 2, 4"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    return f"ranks {shown}{', ...' if len(ranks) > _SHOWN else ''}"
