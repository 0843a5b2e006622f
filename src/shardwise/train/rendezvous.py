"""The meeting of one host's ranks (`meeting`) as torchrun's agent knows it."""

from __future__ import annotations

import secrets
import socket
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from shardwise.train.meeting import LOOPBACK, listen

_BACKEND = "shardwise-loopback"


def rendezvous_options(port: int) -> dict[str, Any]:
    """Of torchrun's LaunchConfig: a store of this process, once."""
    rendezvous_handler_registry.register(_BACKEND, _Loopback)
    return {
        "rdzv_backend": _BACKEND,
        "rdzv_endpoint": LOOPBACK,
        "rdzv_configs": {"listener": listen(port)},
        "run_id": secrets.token_hex(16),
    }


class _Loopback(RendezvousHandler):
    """One agent, which is there already; its store is that of the ranks."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        listener: socket.socket = parameters.config["listener"]
        self._run_id, port = parameters.run_id, listener.getsockname()[1]
        self._place = RendezvousStoreInfo(LOOPBACK, port)
        self._store = dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return _BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(dist.PrefixStore(self._run_id, self._store), 0, 1, self._place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """There is nobody who could still come."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
