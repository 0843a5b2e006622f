"""Messages on a stream: a JSON header, and raw bytes behind it.

    | length of the header, 4 bytes | bytes of the payload, 8 | header | payload |

Nothing is unpickled. Who reads says how much it takes: a longer message ends the connection.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

from shardwise.errors import TransportError

_HEAD = struct.Struct("<IQ")
MAX_HEADER_BYTES = 2**26  # names and boxes of a model's parameters
_IDLE_S, _PROBES = 20, 3  # until a host that has vanished is given up


def send(stream: socket.socket, header: dict[str, Any], payload: Sequence[Any] = ()) -> None:
    """`payload`: objects with bytes, sent one after the other."""
    text = json.dumps(header).encode()
    views = [memoryview(part).cast("B") for part in payload if len(part)]
    stream.sendall(_HEAD.pack(len(text), sum(view.nbytes for view in views)) + text)
    for view in views:
        stream.sendall(view)


def receive(stream: socket.socket, max_bytes: int) -> tuple[dict[str, Any], bytearray]:
    """The next message. TransportError where the other side has ended, or sends something else."""
    head = _exactly(stream, _HEAD.size)
    header_bytes, payload_bytes = _HEAD.unpack(head)
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > max_bytes:
        raise TransportError(
            f"a message of {header_bytes:,} + {payload_bytes:,} bytes, where at most "
            f"{MAX_HEADER_BYTES:,} + {max_bytes:,} were expected"
        )
    try:
        header = json.loads(_exactly(stream, header_bytes))
    except ValueError:
        raise TransportError("a message whose header is no JSON") from None
    if not isinstance(header, dict):
        raise TransportError("a message whose header is no object")
    return header, _exactly(stream, payload_bytes)


def _exactly(stream: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        try:
            count = stream.recv_into(view[got:])
        except OSError as error:
            raise TransportError(f"the connection broke: {error}") from None
        if not count:
            raise TransportError("the other side has closed the connection")
        got += count
    return buffer


def has_closed(stream: socket.socket) -> bool:
    """Of the other side, while nothing is expected from it."""
    try:
        return not stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def keep_alive(stream: socket.socket) -> None:
    """A peer that ended without a word, with its host or cable, is noticed within a minute or so;
    a process that ended is at once."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _IDLE_S)):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_KEEPCNT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def shut(stream: socket.socket) -> None:
    """Also wakes a thread that reads from it."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
    stream.close()
