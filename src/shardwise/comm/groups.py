"""Process groups beside those of the mesh, kept as long as the process group lives.

on_host          for what hosts tell each other while their devices compute. A collective of
                 device tensors whose answer the host reads makes it wait until the device has
                 done all that is queued. Flags that steer the host go over Gloo instead: by the
                 mesh's own group where that serves CPU tensors too ("cpu:gloo,cuda:nccl")
of_hosts         the ranks of an axis that share a host, and those with one number on theirs
for_reductions   a communicator of their own: on one, a gather waits for the reduction that was
                 issued before it
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise._torch_compat import backend_name, timeout_of
from shardwise.comm.kept import kept

CPU = torch.device("cpu")
Group = dist.ProcessGroup | None


def on_host(
    ranks: tuple[int, ...], group: Group, device: torch.device
) -> tuple[Group, torch.device]:
    """A group of these ranks that moves CPU tensors, and the CPU; where Gloo is missing the group
    as it is, and its device. A collective of the ranks when it is called first.
    """
    if device.type == "cpu" or backend_name(group, CPU):
        return group, CPU
    if not dist.is_gloo_available():
        return group, device
    known = kept("host groups")
    if ranks not in known:
        known[ranks] = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    return known[ranks], CPU


def for_reductions(ranks: tuple[int, ...], group: Group, device: torch.device) -> Group:
    """One for all meshes of these ranks. A collective of them when it is called first."""
    return _like("reduce groups", ranks, group, device)


def of_hosts(
    ranks: tuple[int, ...], rank: int, inside: int, group: Group, device: torch.device
) -> tuple[Group, Group]:
    """Of the ranks of an axis, `inside` neighbours on each host: the group of those that have the
    number of `rank` on their hosts, and that of its own host. A collective when it is called first.
    """
    first = rank - rank % inside
    within = _like("groups of hosts", ranks[first : first + inside], group, device)
    return _like("groups of hosts", ranks[rank % inside :: inside], group, device), within


def _like(kind: str, ranks: tuple[int, ...], group: Group, device: torch.device) -> Group:
    """A group with the backends and the timeout of the mesh's own."""
    known, backends = kept(kind), dist.get_backend_config(group)
    timeout = timeout_of(group, device)
    key = (ranks, backends, timeout)
    if key not in known:
        own = {"backend": backends, "timeout": timeout}
        known[key] = dist.new_group(list(ranks), **own, use_local_synchronization=True)
    return known[key]
