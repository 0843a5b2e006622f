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
    from shardwise.comm.limits import set_wait_limit
    from shardwise.comm.transport import Transport
    from shardwise.engine.api import fully_shard
    from shardwise.engine.copies import full_parameters
    from shardwise.engine.finite import check_finite
    from shardwise.engine.grad_utils import clip_grad_norm_, mark_dirty, no_sync
    from shardwise.engine.inspect import record_events
    from shardwise.engine.join import join
    from shardwise.engine.materialize import materialize
    from shardwise.engine.module import (
        FSDPModule,
        UnshardHandle,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from shardwise.engine.placing import ShardPlacementResult
    from shardwise.engine.prefetch import set_prefetch
    from shardwise.engine.reproducible import MicroBatch, ReproducibleRun, reproducible
    from shardwise.engine.shard_model import shard_model
    from shardwise.engine.shard_tensor import ShardTensor
    from shardwise.engine.step_in_backward import step_in_backward
    from shardwise.engine.token_mean import global_mean
    from shardwise.install import install, uninstall
    from shardwise.layout import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        MixedPrecisionPolicy,
        OffloadPolicy,
        Strategy,
    )

__version__ = "0.1.0"

_HOMES = {
    "CPUOffloadPolicy": "layout",
    "DataParallelMeshDims": "layout",
    "CheckpointManager": "checkpoint.manager",
    "FSDPModule": "engine.module",
    "MicroBatch": "engine.reproducible",
    "MixedPrecisionPolicy": "layout",
    "OffloadPolicy": "layout",
    "ReproducibleRun": "engine.reproducible",
    "ShardPlacementResult": "engine.placing",
    "ShardTensor": "engine.shard_tensor",
    "Strategy": "layout",
    "Transport": "comm.transport",
    "UnshardHandle": "engine.module",
    "check_finite": "engine.finite",
    "clip_grad_norm_": "engine.grad_utils",
    "full_parameters": "engine.copies",
    "fully_shard": "engine.api",
    "get_optimizer_state_dict": "checkpoint.optimizer_state",
    "global_mean": "engine.token_mean",
    "join": "engine.join",
    "install": "install",
    "load_full_state_dict": "checkpoint.pretrained",
    "load_pretrained": "checkpoint.pretrained",
    "mark_dirty": "engine.grad_utils",
    "materialize": "engine.materialize",
    "no_sync": "engine.grad_utils",
    "record_events": "engine.inspect",
    "register_fsdp_forward_method": "engine.module",
    "reproducible": "engine.reproducible",
    "save_pretrained": "checkpoint.pretrained",
    "set_prefetch": "engine.prefetch",
    "set_wait_limit": "comm.limits",
    "shard_model": "engine.shard_model",
    "step_in_backward": "engine.step_in_backward",
    "share_comm_ctx": "engine.module",
    "uninstall": "install",
}

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "CheckpointManager",
    "FSDPModule",
    "MicroBatch",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReproducibleRun",
    "ShardPlacementResult",
    "ShardTensor",
    "Strategy",
    "Transport",
    "UnshardHandle",
    "check_finite",
    "clip_grad_norm_",
    "full_parameters",
    "fully_shard",
    "get_optimizer_state_dict",
    "global_mean",
    "join",
    "install",
    "load_full_state_dict",
    "load_pretrained",
    "mark_dirty",
    "materialize",
    "no_sync",
    "record_events",
    "register_fsdp_forward_method",
    "reproducible",
    "save_pretrained",
    "set_prefetch",
    "set_wait_limit",
    "shard_model",
    "step_in_backward",
    "share_comm_ctx",
    "uninstall",
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
