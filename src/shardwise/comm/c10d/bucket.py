"""The bucket of process groups: a layout with its plans, the buffers that are used again, and the
user's own collectives.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.c10d.memory import GroupMemory, SymmetricGather
from shardwise.comm.groups import CPU, for_reductions
from shardwise.comm.kept import kept
from shardwise.comm.transport import Bucket
from shardwise.layout.wire import PLAIN

if TYPE_CHECKING:
    from shardwise.comm.c10d.in_place import InPlaceGather
    from shardwise.comm.c10d.packed_grads import ReducePlan, ReduceStaging
    from shardwise.comm.c10d.staging import GatherPlan, GatherStaging
    from shardwise.comm.wires.reduce import Feedback


@dataclass(slots=True, eq=False, kw_only=True)
class C10dBucket(Bucket):
    """See the module docstring."""

    device: torch.device = CPU  # of its collectives; the buffer may lie on the host
    all_gather: Any = None
    reduce_scatter: Any = None
    memory: GroupMemory | None = None  # where staging is not torch's
    reduce_group: Any = None  # where reductions have a communicator of their own
    gather_plan: GatherPlan | None = None
    gather_staging: GatherStaging | InPlaceGather | None = None
    gathered_to: weakref.ref[torch.Tensor] | None = None
    reduce_plan: ReducePlan | None = None
    reduce_staging: ReduceStaging | None = None
    feedback: Feedback | None = None  # what rounding gradients lost
    is_wired: bool = field(init=False)  # something travels in another way than usual

    def __post_init__(self) -> None:
        self.is_wired = self.layout.wire != PLAIN

    def views_of(self, out: torch.Tensor) -> int:
        kept = self.gather_staging
        return kept.num_views if kept is not None and kept.out is out else 0

    @property
    def group_of_sums(self) -> Any:
        return self.shard.group if self.reduce_group is None else self.reduce_group

    def separate_reductions(self, enable: bool) -> None:
        alone = self.shard.size == 1 or not enable
        own = self.shard.ranks, self.shard.group, self.device
        self.reduce_group = None if alone else for_reductions(*own)

    def allocate_by_group(self, enable: bool) -> None:
        alone = self.shard.size == 1 or not enable
        self.memory = None if alone else GroupMemory(self.shard.group)

    def gather_symmetrically(self, backend: str) -> None:
        if self.shard.size == 1:
            return
        known, key = kept("symmetric gathers"), (self.shard.ranks, backend)
        if key not in known:
            known[key] = SymmetricGather(self.shard.group, backend)
        self.all_gather = known[key]

    def use_collective(self, kind: str, comm: Any) -> None:
        assert kind in ("all_gather", "reduce_scatter"), kind
        setattr(self, kind, comm)
