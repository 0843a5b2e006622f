"""Layout: pure data about who owns which rows, where they lie in a buffer, and what has to move.

No process group, no device. The engine allocates by it, the transports move by it, the planner sums
it, tests assert it.

Reading order: `cuts` -> `strategy`, `policy`, `wire` -> `bucket` -> `reduce` -> `moves` -> `home`
-> `unit`.
"""

from shardwise.layout.bucket import ALIGN, BucketLayout, ParamLayout, ParamSpec, layout_bucket
from shardwise.layout.cuts import Cuts
from shardwise.layout.home import home_layout, home_reduce, middle_layout
from shardwise.layout.mesh_dims import DataParallelMeshDims
from shardwise.layout.moves import Move, Packing, pack_grads, pack_shards
from shardwise.layout.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shardwise.layout.reduce import ReduceLayout, layout_reduce
from shardwise.layout.strategy import (
    STRATEGIES,
    AxisPlacement,
    Lifetime,
    Placed,
    Strategy,
    strategy_named,
)
from shardwise.layout.unit import Collective, Moment, UnitLayout, layout_unit
from shardwise.layout.wire import BucketWire, Format, Wire

__all__ = [
    "ALIGN",
    "STRATEGIES",
    "AxisPlacement",
    "BucketLayout",
    "BucketWire",
    "CPUOffloadPolicy",
    "Collective",
    "Cuts",
    "DataParallelMeshDims",
    "Format",
    "Lifetime",
    "MixedPrecisionPolicy",
    "Moment",
    "Move",
    "OffloadPolicy",
    "Packing",
    "ParamLayout",
    "ParamSpec",
    "Placed",
    "ReduceLayout",
    "Strategy",
    "UnitLayout",
    "Wire",
    "home_layout",
    "home_reduce",
    "layout_bucket",
    "layout_reduce",
    "layout_unit",
    "middle_layout",
    "pack_grads",
    "pack_shards",
    "strategy_named",
]
