"""Where the ranks of one host meet: on the loopback interface, which no other host reaches.

    launcher   a TCPStore over a socket bound to 127.0.0.1 (a TCPStore that binds by itself listens
               on all addresses, whatever its name); it outlives every rank
    ranks      clients of that store; the sockets of Gloo and NCCL on the loopback interface

torchrun's own rendezvous keeps its state as pickles in a store that every host of the network can
write to, under an id that can be guessed. Here there is nobody to agree with: nothing is stored but
what the ranks store, under a random id. Jobs of several hosts are torchrun's; docs/training.md says
what that trusts.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any

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


def open_store(port: int) -> tuple[Any, dict[str, str]]:
    """The store of a start of the job, which lives as long as somebody holds it, and what ranks
    need in their environment to find it."""
    from torch.distributed import TCPStore

    listener = listen(port)
    port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": secrets.token_hex(16),
    }
