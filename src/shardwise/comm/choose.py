"""The registry of transports, and which one serves a mesh: by name, by the user's own object, or
chosen for the hardware.

    "auto"            shared memory where all ranks are CPU ranks of one host, else c10d
    "c10d"            process groups: any backend, any number of hosts
    "shared_memory"   CPU ranks of one host; an error where it cannot work. Takes process groups for
                      phases in which a tool watches collectives (`watch.py`)
    "fake"            records, moves nothing; needs no process group
    "mine"            what `register_transport("mine", ...)` has registered
    a Transport       as it is

An installed package may bring one: its entry point `mine = "package.module:function"` in the group
`shardwise.transports` is the function that opens it. No torch is imported before a transport is
opened, for commands ask for names only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from shardwise.errors import UnavailableError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import torch

    from shardwise.comm.transport import Axis, Transport

ANYWHERE = "c10d"  # serves every mesh, and has all capabilities of an ordered transport
BY_CHOICE = ("shared_memory", ANYWHERE)  # what "auto" takes: the first that can
_METHODS = (
    *("attach", "gather", "grad_buffer", "reduce", "all_reduce"),
    *("enter", "leave", "abandon", "agree", "close"),
)


@dataclass(frozen=True, slots=True)
class Reach:
    """The ranks that a transport is to connect: two axes, and the device that computes. `mesh` are
    the axes of the whole, where these two are a part of it whose phases are the mesh's.
    """

    shard: Axis
    replicate: Axis
    device: torch.device
    mesh: tuple[Axis, Axis]

    @property
    def is_alone(self) -> bool:
        return self.mesh[0].size == self.mesh[1].size == 1


@dataclass(frozen=True, slots=True)
class Entry:
    """How a transport is opened, what speaks against it somewhere (None: nothing, anywhere), and
    whether one can train on it.
    """

    open: Callable[[Reach], Any]
    why_not: Callable[[Reach], str | None] | None = None
    trains: bool = True


def register_transport(
    name: str,
    open: Callable[[Reach], Any],
    why_not: Callable[[Reach], str | None] | None = None,
) -> None:
    """Make a transport known by name: to `fully_shard(transport=name)`, configurations, `bench`,
    `verify` and `explain`.

    Args:
        name: not one of ours.
        open: called with a `Reach` once for each mesh, on all its ranks; returns an object with
            the methods of `shardwise.Transport`.
        why_not: the reason why it cannot serve a `Reach`, the same on all its ranks; None where
            it can.
    """
    if name in _OURS or name == "auto":
        raise ValueError(f"register_transport: {name!r} is one of shardwise's own; take another")
    _ENTRIES[name] = Entry(open, why_not)


def names(*, to_train: bool = True) -> tuple[str, ...]:
    """What may be asked for: ours, what was registered, what installed packages bring."""
    found = ["auto", *(n for n, entry in _ENTRIES.items() if entry.trains or not to_train)]
    return tuple(dict.fromkeys([*found, *_brought()]))


def is_known(name: str) -> bool:
    """Whether it is among `names`. Packages are looked through only for what is not ours."""
    if name in _ENTRIES:
        return _ENTRIES[name].trains
    return name == "auto" or name in _brought()


def unknown_transport(name: str, *, to_train: bool = True) -> str:
    """What to say of a name that is not among them."""
    known = names(to_train=to_train)
    nearest = get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose one of {', '.join(known)}"
    return f"unknown transport {name!r}; {hint}"


def open_transport(
    name: str | Transport[Any],
    shard: Axis,
    replicate: Axis,
    device: torch.device,
    *,
    mesh: tuple[Axis, Axis] | None = None,
) -> Transport[Any]:
    """The transport of a mesh, one for all models on it; all its ranks call it with the same name.
    `mesh`: as in `Reach`.

    Raises ValueError for a name that does not exist, UnavailableError for one that cannot work
    here.
    """
    from shardwise.comm.kept import kept

    reach = Reach(shard, replicate, device, mesh or (shard, replicate))
    if not isinstance(name, str):
        return _checked(name, reach)
    choice, reason = choose(name, reach)
    if reason and choice == name:
        raise UnavailableError(
            f"transport={name!r} cannot serve this mesh: {reason}. Use 'auto' or {ANYWHERE!r}."
        )
    opened = kept("transports")
    axes = ((axis.ranks, id(axis.group)) for axis in (shard, replicate))
    key = (choice, device, *axes, reach.mesh)
    transport: Transport[Any] | None = opened.get(key)
    if transport is None:
        transport = _checked(_entry(choice).open(reach), reach)
        if transport.has_peers:
            opened[key] = transport
    return transport


def choose(name: str, reach: Reach) -> tuple[str, str | None]:
    """A transport's name, and what speaks against it, or against those that come before it."""
    if name == "auto" and reach.is_alone:
        return ANYWHERE, "one rank has nobody to share with"  # and c10d issues nothing then
    reason = None
    for choice in BY_CHOICE if name == "auto" else (name,):
        why_not = _entry(choice).why_not
        against = None if why_not is None else why_not(reach)
        if against is None:
            return choice, reason
        reason = against
    return name, reason


@functools.cache
def _brought() -> dict[str, EntryPoint]:
    """Transports that installed packages bring, by name."""
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group="shardwise.transports")}


def _entry(name: str) -> Entry:
    if name not in _ENTRIES and name in _brought():
        register_transport(name, _brought()[name].load())
    if name not in _ENTRIES:
        raise ValueError(unknown_transport(name, to_train=False))
    return _ENTRIES[name]


def _checked(transport: Any, reach: Reach) -> Transport[Any]:
    """As the engine takes it: with all capabilities, and an order check where it needs one."""
    from shardwise.comm.kept import kept
    from shardwise.comm.ordered import Guarded
    from shardwise.comm.transport import Transport

    if isinstance(transport, type) or not all(hasattr(transport, m) for m in _METHODS):
        raise ValueError(
            f"transport: expected one of {', '.join(names(to_train=False))} or an object with the "
            f"methods of shardwise.Transport, found {transport!r}"
        )
    if isinstance(transport, Transport) and (
        transport.checks_order or not transport.has_peers or not transport.is_ordered
    ):
        return transport
    guarded = kept("guarded")
    if id(transport) not in guarded:
        guarded[id(transport)] = Guarded(transport, reach.shard, reach.replicate, reach.device)
    return guarded[id(transport)]


# -- ours ------------------------------------------------------------------------------------------
def _open_c10d(reach: Reach) -> Transport[Any]:
    from shardwise.comm.c10d.transport import C10dTransport

    return C10dTransport(reach.shard, reach.replicate, reach.device)


def _open_shared_memory(reach: Reach) -> Transport[Any]:
    if reach.is_alone:
        return _open_c10d(reach)
    from shardwise.comm.watched import WatchedTransport

    return WatchedTransport(reach.shard, reach.replicate, reach.mesh)


def _no_shared_memory(reach: Reach) -> str | None:
    if reach.is_alone:
        return None
    if reach.device.type != "cpu":
        return f"parameters live on {reach.device.type}, shared memory serves CPU ranks"
    from shardwise.comm.shared_memory import shared_memory_reason

    return shared_memory_reason(reach.mesh)


def _open_fake(reach: Reach) -> Transport[Any]:
    from shardwise.comm.fake import FakeTransport

    return FakeTransport(reach.shard, reach.replicate)


_OURS = {
    "c10d": Entry(_open_c10d),
    "shared_memory": Entry(_open_shared_memory, _no_shared_memory),
    "fake": Entry(_open_fake, trains=False),
}
_ENTRIES = dict(_OURS)
