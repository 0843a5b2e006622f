"""Does somebody watch the collectives of this process? Asked whenever control enters the engine.

Tools that count, log or replace communication see c10d's operators, or the functions of
torch.distributed. What moves through shared memory they cannot see, and would report as nothing.
So in a phase in which any rank is watched, the shared-memory transport moves everything over
process groups (`watched.py`). Watched means

    a dispatch mode is active       CommDebugMode, DebugMode, one of the user's own
    a function was replaced         torch.distributed.all_gather_single, reduce_scatter_single, ...

Modes of activation checkpointing and FLOP counting are there for other reasons and do not count.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise._torch_compat import dispatch_modes, num_dispatch_modes

_FUNCTIONS = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
    "broadcast",
    "reduce",
)
# Those that exist; torch before 2.13 lacks the names that end in "single".
ORIGINALS = {n: f for n in _FUNCTIONS if (f := getattr(distributed_c10d, n, None)) is not None}
_OTHER_REASONS = ("torch.utils.checkpoint", "torch.utils.flop_counter", "torch._", "torch.fx.")


def is_watched() -> bool:
    """True while a tool could see collectives of this rank."""
    if num_dispatch_modes() and any(
        not type(mode).__module__.startswith(_OTHER_REASONS) for mode in dispatch_modes()
    ):
        return True
    return bool(replaced())


def replaced() -> list[str]:
    """Names of collectives in torch.distributed that somebody has replaced."""
    return [
        name for name, original in ORIGINALS.items() if getattr(dist, name, None) is not original
    ]
