"""shardwise: a fully sharded data parallel engine for PyTorch, with tools to plan and check runs.

What is listed here is public. Names are imported at first use, so that `shardwise --help` does not
wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpoint.manager import CheckpointManager
    from shardwise.checkpoint.optimizer_state import get_optimizer_state_dict
    from shardwise.checkpoint.pretrained import (
        load_full_state_dict,
        load_pretrained,
        save_pretrained,
    )
    from shardwise.comm.choose import register_transport
    from shardwise.comm.limits import set_wait_limit
    from shardwise.comm.transport import Transport
    from shardwise.engine.api import fully_shard
    from shardwise.engine.guards.finite import check_finite
    from shardwise.engine.mesh.own_rows import (
        BlockRows,
        WholeOn,
        whole_blocks,
        whole_matrices,
    )
    from shardwise.engine.mesh.placing import ShardPlacementResult
    from shardwise.engine.mesh.rows import RowShard
    from shardwise.engine.module import (
        FSDPModule,
        UnshardHandle,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from shardwise.engine.reproducible.run import MicroBatch, ReproducibleRun, reproducible
    from shardwise.engine.services.clip import clip_grad_norm_, mark_dirty, no_sync
    from shardwise.engine.services.copies import full_parameters
    from shardwise.engine.services.inspect import record_events
    from shardwise.engine.services.join import join
    from shardwise.engine.services.materialize import materialize
    from shardwise.engine.services.prefetch import set_prefetch
    from shardwise.engine.services.shard_model import shard_model
    from shardwise.engine.services.step_in_backward import step_in_backward
    from shardwise.engine.services.tokens import global_mean
    from shardwise.engine.tensor.shard_tensor import ShardTensor
    from shardwise.install import install, uninstall
    from shardwise.layout import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
        Strategy,
        Wire,
    )
    from shardwise.offload import OffloadedOptimizer
    from shardwise.owned import OwnedOptimizer, local_view

__version__ = "0.1.0"

_HOMES = {
    "BlockRows": "engine.mesh.own_rows",
    "CPUOffloadPolicy": "layout",
    "DataParallelMeshDims": "layout",
    "CheckpointManager": "checkpoint.manager",
    "FSDPModule": "engine.module",
    "MicroBatch": "engine.reproducible.run",
    "MixedPrecisionPolicy": "layout",
    "OffloadPolicy": "layout",
    "OffloadedOptimizer": "offload",
    "OwnedOptimizer": "owned",
    "ReproducibleRun": "engine.reproducible.run",
    "ShardPlacementResult": "engine.mesh.placing",
    "RowShard": "engine.mesh.rows",
    "ShardTensor": "engine.tensor.shard_tensor",
    "Strategy": "layout",
    "Transport": "comm.transport",
    "UnshardHandle": "engine.module",
    "WholeOn": "engine.mesh.own_rows",
    "Wire": "layout",
    "check_finite": "engine.guards.finite",
    "clip_grad_norm_": "engine.services.clip",
    "full_parameters": "engine.services.copies",
    "fully_shard": "engine.api",
    "get_optimizer_state_dict": "checkpoint.optimizer_state",
    "global_mean": "engine.services.tokens",
    "join": "engine.services.join",
    "local_view": "owned",
    "install": "install",
    "load_full_state_dict": "checkpoint.pretrained",
    "load_pretrained": "checkpoint.pretrained",
    "mark_dirty": "engine.services.clip",
    "materialize": "engine.services.materialize",
    "no_sync": "engine.services.clip",
    "record_events": "engine.services.inspect",
    "register_fsdp_forward_method": "engine.module",
    "register_transport": "comm.choose",
    "reproducible": "engine.reproducible.run",
    "save_pretrained": "checkpoint.pretrained",
    "set_prefetch": "engine.services.prefetch",
    "set_wait_limit": "comm.limits",
    "shard_model": "engine.services.shard_model",
    "step_in_backward": "engine.services.step_in_backward",
    "share_comm_ctx": "engine.module",
    "uninstall": "install",
    "whole_blocks": "engine.mesh.own_rows",
    "whole_matrices": "engine.mesh.own_rows",
}

__all__ = [
    "BlockRows",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "CheckpointManager",
    "FSDPModule",
    "MicroBatch",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OffloadedOptimizer",
    "OwnedOptimizer",
    "ReproducibleRun",
    "ShardPlacementResult",
    "RowShard",
    "ShardTensor",
    "Strategy",
    "Transport",
    "UnshardHandle",
    "WholeOn",
    "Wire",
    "check_finite",
    "clip_grad_norm_",
    "full_parameters",
    "fully_shard",
    "get_optimizer_state_dict",
    "global_mean",
    "join",
    "local_view",
    "install",
    "load_full_state_dict",
    "load_pretrained",
    "mark_dirty",
    "materialize",
    "no_sync",
    "record_events",
    "register_fsdp_forward_method",
    "register_transport",
    "reproducible",
    "save_pretrained",
    "set_prefetch",
    "set_wait_limit",
    "shard_model",
    "step_in_backward",
    "share_comm_ctx",
    "uninstall",
    "whole_blocks",
    "whole_matrices",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(f"shardwise.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
