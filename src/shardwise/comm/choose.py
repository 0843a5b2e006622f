"""Which transport serves a mesh: by name, by the user's own object, or chosen for the hardware.

"auto"            shared memory where all ranks are CPU ranks of one host, else c10d
"c10d"            process groups: any backend, any number of hosts
"shared_memory"   CPU ranks of one host; an error where it cannot work. Takes process groups for
                  phases in which a tool watches collectives (`watch.py`)
"fake"            records, moves nothing; needs no process group
a Transport       as it is
"""

from __future__ import annotations

from difflib import get_close_matches

import torch

from shardwise.comm.c10d.transport import C10dTransport
from shardwise.comm.fake import FakeTransport
from shardwise.comm.kept import kept
from shardwise.comm.transport import Axis, Transport
from shardwise.errors import UnavailableError

NAMES = ("auto", "c10d", "shared_memory", "fake")


def open_transport(
    name: str | Transport,
    shard: Axis,
    replicate: Axis,
    device: torch.device,
    *,
    mesh: tuple[Axis, Axis] | None = None,
) -> Transport:
    """The transport of a mesh, one for all models on it; all its ranks call it with the same name.
    `mesh`: the axes of the whole, where the two are a part of it whose phases are the mesh's.

    Raises ValueError for a name that does not exist, UnavailableError for one that cannot work
    here.
    """
    if not isinstance(name, str):
        return _users_own(name)
    mesh = mesh or (shard, replicate)
    choice, reason = _choose(name, *mesh, device)
    if choice == "fake":
        return FakeTransport(shard, replicate)
    if choice == "shared_memory" and reason:
        raise UnavailableError(
            f"transport='shared_memory' cannot serve this mesh: {reason}. Use 'auto' or 'c10d'."
        )
    opened = kept("transports")
    key = (choice, *((axis.ranks, id(axis.group)) for axis in (shard, replicate)), mesh)
    transport: Transport | None = opened.get(key)
    if transport is None:
        transport = opened[key] = _open(choice, shard, replicate, device, mesh)
    return transport


def _open(
    choice: str, shard: Axis, replicate: Axis, device: torch.device, mesh: tuple[Axis, Axis]
) -> Transport:
    if choice == "c10d":
        return C10dTransport(shard, replicate, device)
    from shardwise.comm.watched import WatchedTransport

    return WatchedTransport(shard, replicate, mesh)


def explain_choice(
    name: str | Transport, shard: Axis, replicate: Axis, device: torch.device
) -> str:
    """One sentence: the transport that `open_transport` gives, and why."""
    if not isinstance(name, str):
        return f"{_users_own(name).name}: the transport object that was passed"
    choice, reason = _choose(name, shard, replicate, device)
    if name != "auto":
        return f"{choice}: asked for by name" + (
            f", but it cannot work here: {reason}" if reason else ""
        )
    if choice == "shared_memory":
        return (
            "shared_memory: the ranks run on the CPU of one host and can read each other's memory"
        )
    return f"c10d: {reason}"


def _choose(
    name: str, shard: Axis, replicate: Axis, device: torch.device
) -> tuple[str, str | None]:
    """The transport's name, and what speaks against shared memory if it was considered."""
    if name not in NAMES:
        nearest = get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose one of {', '.join(NAMES)}"
        raise ValueError(f"unknown transport {name!r}; {hint}")
    if name in ("c10d", "fake"):
        return name, None
    if shard.size == 1 and replicate.size == 1:
        return "c10d", "one rank has nobody to share with"  # and c10d issues nothing then
    reason = _no_shared_memory(shard, replicate, device)
    if name == "auto" and reason:
        return "c10d", reason
    return "shared_memory", reason


def _no_shared_memory(shard: Axis, replicate: Axis, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"parameters live on {device.type}, shared memory serves CPU ranks"
    from shardwise.comm.shared_memory import shared_memory_reason

    return shared_memory_reason((shard, replicate))


def _users_own(transport: Transport) -> Transport:
    if isinstance(transport, type) or not isinstance(transport, Transport):
        raise ValueError(
            f"transport: expected one of {', '.join(NAMES)} or an object with the methods of "
            f"shardwise.Transport, found {transport!r}"
        )
    return transport
