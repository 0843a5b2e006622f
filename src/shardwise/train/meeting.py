"""Where the ranks of one host meet: on the loopback interface, which no other host reaches.

    launcher   a TCPStore over a socket bound to 127.0.0.1 (a TCPStore that binds by itself listens
               on all addresses, whatever its name); it outlives every rank
    ranks      clients of that store; the sockets of Gloo and NCCL on the loopback interface

torchrun's own rendezvous keeps its state as pickles in a store that every host of the network can
write to, under an id that can be guessed. Here one agent has nobody to agree with: nothing is
stored but what the ranks store, under a random id (`rendezvous`). Jobs of several hosts are
torchrun's; docs/training.md says what that trusts. No torch here.
"""

from __future__ import annotations

import os
import socket

from shardwise.errors import ConfigError

LOOPBACK = "127.0.0.1"


def stay_on_loopback() -> None:
    """Process groups of this process, and of those that it starts, listen on loopback only."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ["GLOO_SOCKET_IFNAME"] = names[0]
        os.environ["NCCL_SOCKET_IFNAME"] = f"={names[0]}"


def listen(port: int) -> socket.socket:
    """A socket for the store; ConfigError where somebody else has the port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port: {port} cannot be used ({error.strerror}); choose another, or leave it out"
        ) from None
    return listener
