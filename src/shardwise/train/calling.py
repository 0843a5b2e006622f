"""How a model is called with a batch, and what its output says; for models of transformers as for
one's own.

    a dict            forward(**batch) where forward names one of its keys, else forward(batch)
    a list or tuple   forward(*batch) where one argument is too few, else forward(batch)
    tokens            forward(input_ids=batch, labels=batch) of a causal language model of
                      transformers, which shifts the labels itself
    anything else     forward(batch)

Where forward takes `use_cache`, it gets False: models of transformers would keep keys and values
for a generation that does not come, and with these they forget the borders of packed documents.

The output is the loss, or holds it as ["loss"] or .loss; other numbers beside it are logged.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def outputs_of(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """One forward: what the model returned as named scalars, the loss among them."""
    args, kwargs = arguments_of(model, batch)
    result = model(*args, **kwargs)
    outputs = result if isinstance(result, Mapping) else {"loss": getattr(result, "loss", result)}
    loss = outputs.get("loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"model.kind: {_name_of(model)} must return its loss (one number), or something with "
            f"['loss'] or .loss; got {_described(result)}{_missing_labels(model, kwargs or args)}"
        )
    return {k: torch.as_tensor(v) for k, v in outputs.items() if _is_number(v)}


def arguments_of(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `model` is called with; ConfigError for a dict that fits half."""
    signature = inspect.signature(model.forward)
    named = {p.name for p in signature.parameters.values() if p.kind in _NAMED}
    uncached = {"use_cache": False} if "use_cache" in named else {}
    if isinstance(batch, Mapping):
        if named and not named & batch.keys():
            return (batch,), {}
        try:
            signature.bind(**batch)
        except TypeError as error:
            raise ConfigError(
                f"model.kind: the forward of {_name_of(model)} does not take a batch with the keys "
                f"{', '.join(map(str, batch))}: {error}"
            ) from None
        return (), uncached | dict(batch)
    if is_causal_lm(model) and isinstance(batch, Tensor) and not batch.is_floating_point():
        return (), {"input_ids": batch, "labels": batch, **uncached}
    if isinstance(batch, list | tuple) and not _fits(signature, batch) and _fits(signature, *batch):
        return tuple(batch), {}
    return (batch,), {}


def is_causal_lm(model: nn.Module) -> bool:
    """A causal language model of transformers, which shifts labels itself: by the name under which
    transformers chooses a model's loss."""
    chosen = getattr(model, "loss_type", "") == "ForCausalLM"
    return chosen or any(c.__name__ == "GPT2LMHeadModel" for c in type(model).__mro__)


def _fits(signature: inspect.Signature, /, *args: Any) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float)


def _missing_labels(model: nn.Module, given: Any) -> str:
    """What most often lacks where the forward of a model takes labels."""
    takes = "labels" in inspect.signature(model.forward).parameters
    return (
        "; its loss needs labels, which the batch lacks" if takes and "labels" not in given else ""
    )


def _described(result: Any) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {list(result.shape)}"
    keys = (
        f" with {', '.join(map(str, result)) or 'nothing'}" if isinstance(result, Mapping) else ""
    )
    return type(result).__name__ + keys


def _name_of(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")
