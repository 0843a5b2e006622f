"""A model under shardwise or torch's FSDP2, on the CPU of one process, as on a device with streams.

torch's fake process group stands for the other ranks: its collectives move nothing, and memory is
what counts here. Both engines take their streams from the recorder's module: shardwise by
`comm.streams`, FSDP2 where it asks for the module of a device. shardwise's blocks of CPU memory are
off, since on a device the allocator keeps what is released.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardwise as sw
from memory_trace import Recorder
from shardwise.comm import blocks, streams
from shardwise.comm.c10d import transport
from shardwise.comm.kept import kept
from shardwise.engine.core.state import units_in

ENGINES = ("shardwise", "fsdp2")
_FSDP2 = "torch.distributed.fsdp._fully_shard."


@contextlib.contextmanager
def device_streams(recorder: Recorder) -> Iterator[None]:
    """Both engines believe that the CPU has streams: the recorder's."""

    module = torch.get_device_module

    def get_device_module(device: Any = None) -> Any:
        return recorder.module if torch.device(device or "cpu").type == "cpu" else module(device)

    with contextlib.ExitStack() as patches:
        enter = patches.enter_context
        enter(mock.patch.object(torch, "get_device_module", get_device_module))
        enter(mock.patch.dict(streams.MAKERS, cpu=streams.DeviceStreams))
        enter(mock.patch.object(transport, "coalesces", lambda group, device: True))  # as NCCL
        enter(mock.patch.object(blocks, "SMALLEST_BYTES", sys.maxsize))
        for name in [name for name in sys.modules if name.startswith(_FSDP2)]:
            if hasattr(sys.modules[name], "_get_device_handle"):
                handle = lambda device_type="cpu": recorder.module  # noqa: E731
                enter(mock.patch.object(sys.modules[name], "_get_device_handle", handle))
        _forget_streams()
        try:
            yield
        finally:
            _forget_streams()


def _forget_streams() -> None:
    streams.streams_for.cache_clear()
    kept("transports").clear()


def shard(
    engine: str, model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, precision: str
) -> Any:
    """`model` under an engine, with its default of releasing parameters after the forward."""
    dtypes: dict[str, Any] = {}
    if precision == "bf16":
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    call: Callable[..., Any] = torch_fully_shard
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": TorchPolicy(**dtypes)}
    if engine == "shardwise":
        call = sw.fully_shard
        options |= {"mp_policy": sw.MixedPrecisionPolicy(**dtypes), "transport": "c10d"}
    for unit in units:
        call(unit, **options)
    return call(model, **options)


def record(
    engine: str,
    build: Callable[[], tuple[nn.Module, list[nn.Module]]],
    loss_of: Callable[[Any], torch.Tensor],
    mesh: DeviceMesh,
    precision: str,
    num_steps: int,
    recorder: Recorder,
) -> Any:
    """Train for some steps of AdamW; returns the model. The whole model, from which the shards
    are cut, is not counted: a model that needs shards is made on the meta device.
    """
    model, units = build()
    with device_streams(recorder):
        model = shard(engine, model, units, mesh, precision)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        with recorder:
            recorder.adopt([*model.parameters(), *model.buffers()])
            for _ in range(num_steps):
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.end_step()
    return model


def padding(model: nn.Module) -> tuple[int, int]:
    """Bytes of padding that shardwise gathers with all parameters, and of the parameters."""
    padded = real = 0
    for unit in units_in(model):
        for grads in unit.gradients.buckets:
            layout = grads.state.layout
            size = layout.gather_dtype.itemsize
            padded += layout.chunk_numel * layout.world * size
            real += sum(p.spec.numel for p in layout.params) * size
    return padded - real, real
