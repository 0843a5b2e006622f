"""How ranks get at each other's arenas, and the proof that they did. Collective, once per mesh.

    1  every rank makes its arena and shows its card: host, process id, descriptor number, nonce
    2  every rank opens /proc/PID/fd/N of each peer and reads the nonce and the lock there
    3  all verdicts are exchanged; where somebody failed, all try descriptors over a unix socket
    4  verdicts again: every rank gets the same answer, a domain or the same reason

A nonce that matches proves more than equal host names: containers share a boot id, process ids mean
something else in another namespace, and /proc may be closed to other users. The socket's name is
public (/proc/net/unix), so a rank hands its descriptor only to who knows the nonces.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.comm.exchange import gather_objects
from shardwise.comm.shared_memory import futex
from shardwise.comm.shared_memory.arena import Arena, Mapping
from shardwise.comm.shared_memory.control import HEAD_BYTES, Control
from shardwise.comm.transport import Axis

_SOCKET_LIMIT_S = 5.0
_THIS_PROCESS = secrets.token_bytes(8)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank shows of itself before anything is shared."""

    rank: int
    boot_id: str = ""
    pid: int = 0
    process: bytes = b""
    fd: int = -1
    size_bytes: int = 0
    nonce: bytes = b""
    secret: bytes = b""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Access:
    """The arenas of all ranks of a mesh, in the order of their global ranks."""

    me: int
    arena: Arena
    controls: tuple[Control, ...]
    ranks: tuple[int, ...]


def open_access(shard: Axis, replicate: Axis) -> Access | str:
    """Access to all ranks of the mesh, or the reason why there is none: the same on all ranks."""
    rank = shard.ranks[shard.rank]
    card, arena = _prepare(rank, shard.size * replicate.size)
    cards: list[Card] = sorted(exchange(shard, replicate, card), key=lambda c: c.rank)
    reason = next((f"rank {c.rank}: {c.trouble}" for c in cards if c.trouble), None)
    if reason or arena is None:
        return reason or "no arena"
    if len({c.boot_id for c in cards}) > 1:
        return "the ranks run on several hosts: " + ", ".join(
            f"rank {c.rank} on boot {c.boot_id[:8]}" for c in cards
        )
    if len({(c.pid, c.process) for c in cards}) < len(cards):
        return "ranks are threads of one process, which share memory anyway"
    reason = ""
    for opener in _OPENERS:
        mappings, trouble = _try(opener, cards, rank, arena)
        verdicts = sorted(exchange(shard, replicate, (rank, trouble)))
        failed = [f"rank {r}: {text}" for r, text in verdicts if text]
        if not failed:
            ranks = tuple(c.rank for c in cards)
            controls = tuple(Control(m) for m in mappings)
            return Access(ranks.index(rank), arena, controls, ranks)
        reason += ("; then " if reason else "") + failed[0]
    return reason


def exchange(shard: Axis, replicate: Axis, item: Any) -> list[Any]:
    """The items of all ranks of a mesh."""
    rows = _all_gather(shard, item)
    return [x for row in _all_gather(replicate, rows) for x in row]


def _all_gather(axis: Axis, item: Any) -> list[Any]:
    if axis.size == 1:
        return [item]
    return gather_objects(item, axis.group, "ranks that are to share memory")


def _prepare(rank: int, num_ranks: int) -> tuple[Card, Arena | None]:
    card = Card(rank)
    trouble = futex.unsupported()
    if trouble:
        return replace(card, trouble=trouble), None
    try:
        arena = Arena(f"shardwise-{rank}", HEAD_BYTES, num_ranks)
        control = Control(arena)
        control.nonce = secrets.token_bytes(16)
        control.pid = os.getpid()
        boot_id = _BOOT_ID.read_text().strip()
    except (OSError, MemoryError) as error:
        return replace(card, trouble=f"cannot make shared memory: {error}"), None
    return (
        Card(
            rank,
            boot_id,
            os.getpid(),
            _THIS_PROCESS,
            arena.fd,
            arena.size_bytes,
            control.nonce,
            secrets.token_bytes(16),
        ),
        arena,
    )


def _try(
    opener: Callable[[list[Card], int], dict[int, int]], cards: list[Card], rank: int, arena: Arena
) -> tuple[list[Mapping], str]:
    """Mappings of all arenas, or what went wrong."""
    fds: dict[int, int] = {}
    mappings: list[Mapping] = []
    try:
        fds = opener(cards, rank)
        for card in cards:
            if card.rank == rank:
                mappings.append(arena)
                continue
            mapping = Mapping(fds.pop(card.rank), card.size_bytes)
            mappings.append(mapping)
            if Control(mapping).nonce != card.nonce:
                return [], f"what it opened as the memory of rank {card.rank} is something else"
            if not mapping.owner_lives():
                return [], f"it cannot see that rank {card.rank} is alive (no file locks here)"
    except (OSError, ValueError) as error:
        return [], f"cannot open its peers' memory ({opener.__name__.strip('_')}): {error}"
    finally:
        for fd in fds.values():
            os.close(fd)
    return mappings, ""


def _open_by_proc(cards: list[Card], rank: int) -> dict[int, int]:
    fds: dict[int, int] = {}
    try:
        for card in cards:
            if card.rank != rank:
                fds[card.rank] = os.open(f"/proc/{card.pid}/fd/{card.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        for fd in fds.values():
            os.close(fd)
        raise
    return fds


def _open_by_socket(cards: list[Card], rank: int) -> dict[int, int]:
    """Everybody listens, calls everybody, and answers who knows its secret with its descriptor.

    Calls are queued by the kernel, so nobody has to answer before it has called. A peer that does
    not listen yet is tried again until the time limit.
    """
    own = next(c for c in cards if c.rank == rank)
    peers = [c for c in cards if c.rank != rank]
    fds: dict[int, int] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.settimeout(_SOCKET_LIMIT_S)
        listener.bind(_address(own))
        listener.listen(len(cards))
        calls = {}
        for peer in peers:
            calls[peer.rank] = call = stack.enter_context(_call(peer))
            call.sendall(peer.secret)
        served = 0
        while served < len(peers):
            caller, _ = listener.accept()
            # A stranger, or one that hangs up, is passed over.
            with caller, contextlib.suppress(OSError):
                caller.settimeout(_SOCKET_LIMIT_S)
                if secrets.compare_digest(caller.recv(64), own.secret):
                    socket.send_fds(caller, [b"!"], [own.fd])
                    served += 1
        try:
            for peer_rank, call in calls.items():
                _, received, _, _ = socket.recv_fds(call, 1, 1)
                # A passed descriptor shares the owner's open file, a lock query needs one of its
                # own.
                fds[peer_rank] = os.open(f"/proc/self/fd/{received[0]}", os.O_RDWR | os.O_CLOEXEC)
                os.close(received[0])
        except (OSError, IndexError) as error:
            for fd in fds.values():
                os.close(fd)
            raise OSError(f"no descriptor came over the socket: {error}") from error
    return fds


def _call(peer: Card) -> socket.socket:
    deadline = time.monotonic() + _SOCKET_LIMIT_S
    while True:
        call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        call.settimeout(_SOCKET_LIMIT_S)
        try:
            call.connect(_address(peer))
        except OSError:
            call.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return call


def _address(card: Card) -> str:
    """An abstract address: no file that a killed rank would leave behind."""
    return f"\0shardwise-{card.rank}-{card.nonce.hex()}"


_OPENERS = (_open_by_proc, _open_by_socket)
