"""Temporary stand-in for the engine, on torch's own fully_shard; deleted when the engine is there."""

import contextlib
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, FSDPModule


def shard_model(
    model,
    *,
    mesh=None,
    strategy="full_shard",
    unit="auto",
    transport="auto",
    mp_policy=None,
    activation_checkpointing=False,
):
    kw = {"mesh": mesh} | ({"mp_policy": mp_policy} if mp_policy else {})
    for m in list(model.modules()):
        if isinstance(m, nn.ModuleList):
            for b in m:
                fully_shard(b, **kw)
    fully_shard(model, **kw)
    return model


def materialize(model, *, device, seed):
    model.to_empty(device=device)
    torch.manual_seed(seed)
    for m in model.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()


@contextlib.contextmanager
def no_sync(model):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def clip_grad_norm_(params, max_norm):
    n = torch.nn.utils.clip_grad_norm_(params, max_norm)
    return n.full_tensor() if hasattr(n, "full_tensor") else n
