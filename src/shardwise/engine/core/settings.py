"""What users set on a unit, by FSDP2's methods (`engine.settings`); a copy of the unit takes it
over whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Settings:
    """Of one unit.

    Attributes:
        root_rule: reshard_after_forward=None: the root's own unit is kept, others are released.
        has_own_factor: `divide_by` was given to this unit, not to one above.
        max_reductions: in flight at a time, where they run beside computing.
        separates_reductions: over a communicator of their own.
        allocates_by_group: staging lies in memory of the process group's backend.
        symmetric_backend: whose symmetric memory gathers are staged in; "": none.
        all_reduce_hook: called with this rank's part of a sum, behind the last all-reduce.
    """

    reshard_after_forward: bool
    reshard_after_backward: bool
    root_rule: bool = False
    unshard_in_backward: bool = True
    requires_sync: bool = True
    requires_all_reduce: bool = True
    divide_by: float | None = None
    has_own_factor: bool = False
    max_reductions: int = 1
    separates_reductions: bool = False
    allocates_by_group: bool = False
    symmetric_backend: str = ""
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
