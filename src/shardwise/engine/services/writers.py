"""Methods of other libraries that write a model's whole weights: they get whole weights.

`save_pretrained` of `transformers` reads the model's state dict, whose entries are shards here. On
a sharded module it gathers them first, a collective, so all ranks call it; one rank writes (the
first, or those that say `is_main_process=True`).
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import local_of
from shardwise.engine.services.copies import full_parameters


def writers_of(cls: type) -> dict[str, Any]:
    """What a sharded module has instead of such methods of its class."""
    write: Any = getattr(cls, "save_pretrained", None)
    if not callable(write) or "state_dict" not in inspect.signature(write).parameters:
        return {}

    theirs: Any = getattr(cls, "should_save_on_this_rank", lambda *_, **__: True)

    @functools.wraps(write)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_sharded_by_them(self):
            return write(self, *args, **kwargs)
        bound = inspect.signature(write).bind(self, *args, **kwargs)
        writes = bound.arguments.get("is_main_process", dist.get_rank() == 0)
        if bound.arguments.get("state_dict") is None:
            bound.arguments["state_dict"] = whole_state(self, keep=writes)
        return write(*bound.args, **bound.kwargs) if writes else None

    def should_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Asked on ranks that write, no other: theirs says yes on the first rank only.
        return theirs(self, *args, **kwargs) if _is_sharded_by_them(self) else True

    return {"save_pretrained": save_pretrained, "should_save_on_this_rank": should_save}


def _is_sharded_by_them(model: nn.Module) -> bool:
    """By `from_pretrained(distributed_config=...)`: their writing is a collective then."""
    return bool(getattr(model, "is_distributed_loading_by_transformers", False))


def whole_state(model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """The state dict with whole tensors in host memory, tied ones once. Empty without `keep`."""
    places = {name: _place(p) for name, p in model.state_dict().items()}
    whole = {
        places[name]: tensor.cpu().clone()
        for name, tensor in full_parameters(model)
        if keep and name in places
    }
    entries = model.state_dict() if keep else {}
    return {name: whole.get(_place(t), t) for name, t in entries.items()}


def _place(entry: Any) -> int:
    if not isinstance(entry, torch.Tensor):
        return id(entry)
    tensor = local_of(entry) if isinstance(entry, DTensor) else entry
    return tensor.untyped_storage().data_ptr() or id(entry)
