"""What is kept as long as the process group lives: transports, domains, the board.

Kept for good in that time, whoever uses it: ranks collect garbage at different moments, and all
must agree on whether the next call makes something new, which is a collective. A process that
starts a new process group lets go of what belonged to the one before.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch.distributed as dist

from shardwise.comm.ending import wait_at_exit

# By thread, since ranks may be threads: the default group, and what is kept under it, by kind.
_kept: dict[int, tuple[object, dict[str, dict[Any, Any]]]] = {}


def kept(kind: str) -> dict[Any, Any]:
    """What is kept of one kind under the present default process group."""
    thread = threading.get_ident()
    world = dist.group.WORLD if dist.is_initialized() else None
    group, kinds = _kept.get(thread, (world, {}))
    if group is not world:
        for old in [item for items in kinds.values() for item in items.values()]:
            if hasattr(old, "close"):
                old.close()
        kinds = {}
        _kept[thread] = (world, kinds)
        wait_at_exit()
        gc.collect()  # circles among them hold files and memory
    if thread not in _kept:
        _kept[thread] = (world, kinds)
        wait_at_exit()
    return kinds.setdefault(kind, {})
