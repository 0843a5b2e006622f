"""The loss of causal language models of transformers, exact and without all logits.

`use_token_loss(model, ...)` is called once, when the model is built and before it is sharded. It
gives every causal model a loss function of ours: the mean over the trained tokens, zero where a
micro-batch has none (transformers' is no number there). Where logits are chunked, it also changes
two forwards on these objects:

    model   while its forward runs with labels, `self.lm_head` is a stand-in that computes nothing
            (`lazy.py`); the output has no logits
    head    with targets, returns the loss (`chunked.py`); it is called once, by the loss function

So the head is called as a module: the engine gathers its weight for it, whether it is a unit of its
own, in the root's, tied to the embedding, or frozen.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.train.calling import is_causal_lm
from shardwise.train.loss.chunked import Operation, linear_cross_entropy, rows_of_chunk
from shardwise.train.loss.lazy import LazyLogits
from shardwise.train.loss.weights import NOT_TRAINED

Mode = Literal["auto", "on", "off"]

# Of the plain way: logits in float32, their log-softmax, and the gradient.
LOGIT_COPIES = 3


@dataclass(frozen=True, slots=True)
class LossChoice:
    """How the loss of a model is computed; `why_not`: its head cannot be chunked."""

    mode: Mode
    dim: int = 0
    is_trained: bool = True
    why_not: str = ""

    def chunks(self, num_tokens: int) -> bool:
        """Whether a micro-batch of that many tokens is computed without all of its logits: in auto,
        where they cost more than what chunking needs, which is a chunk and the head's gradient."""
        if self.mode == "off" or self.why_not:
            return False
        needed = rows_of_chunk(self.dim) + (self.dim if self.is_trained else 0)
        return self.mode == "on" or LOGIT_COPIES * num_tokens > needed


def use_token_loss(model: nn.Module, mode: Mode) -> LossChoice | None:
    """Gives a causal model of transformers, or the one inside of a wrapper, our loss; None for
    other models.

    Args:
        model: built, not sharded; may be on meta.
        mode: of `train.chunked_loss`.

    Raises:
        ConfigError: mode is "on", and the model's loss cannot be chunked.
    """
    found = next((m for m in model.modules() if _has_loss_function(m)), None)
    if found is not None:
        found.__dict__.pop("forward", None)  # of an earlier choice
    if found is None:
        if mode == "on":
            raise ConfigError(
                f"train.chunked_loss: {type(model).__name__} is no causal language model of "
                "transformers; use auto or off"
            )
        return None
    cast(Any, found).loss_function = token_mean
    head = found.get_output_embeddings()  # type: ignore[operator]
    name = next((name for name, module in found.named_modules() if module is head), "")
    if type(head) is not nn.Linear or not name:
        kind = type(head).__name__
        why_not = f"the head of {type(found).__name__} is a {kind}, not a Linear of the model"
        if mode == "on":
            raise ConfigError(f"train.chunked_loss: {why_not}; use auto or off")
        return LossChoice(mode, why_not=why_not)
    choice = LossChoice(mode, head.in_features, head.weight.requires_grad)
    if mode != "off":
        head.forward = types.MethodType(_head_forward, head)  # type: ignore[method-assign]
        forward = _forward_of(type(found), name, choice)
        found.forward = types.MethodType(forward, found)  # type: ignore[method-assign]
    return choice


def token_mean(
    logits: Tensor | LazyLogits,
    labels: Tensor,
    *_unused: Any,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = NOT_TRAINED,
    shift_labels: Tensor | None = None,
    **_more: Any,
) -> Tensor:
    """The mean cross-entropy over trained tokens, as transformers' loss function has it; 0 where
    there are none. With `num_items_in_batch` the sum is divided by that."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.to(logits.device)
    chosen = targets != ignore_index
    if isinstance(logits, LazyLogits):
        total = logits.loss(targets, chosen)
    else:
        scores = logits.reshape(-1, logits.shape[-1]).float()
        total = F.cross_entropy(
            scores, targets.reshape(-1), ignore_index=ignore_index, reduction="sum"
        )
    count = chosen.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return total / count


def _has_loss_function(module: nn.Module) -> bool:
    """Models that wrap one (adapters) have no loss of their own, and come first."""
    return is_causal_lm(module) and hasattr(type(module), "loss_function")


def _head_forward(
    self: nn.Linear,
    hidden: Tensor,
    targets: Tensor | None = None,
    operations: Sequence[Operation] = (),
) -> Tensor:
    """Logits, or with `targets` the sum of the losses."""
    if targets is None:
        return F.linear(hidden, self.weight, self.bias)
    return linear_cross_entropy(hidden, self.weight, self.bias, targets, operations)


class _StandIn:
    """What the model's own forward finds in place of its head."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head

    def __call__(self, hidden: Tensor) -> LazyLogits:
        return LazyLogits(self._head, hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


def _forward_of(cls: type[nn.Module], head: str, choice: LossChoice) -> Any:
    """A forward for models of that class that lets the loss function run the head."""
    above, _, name = head.rpartition(".")

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if labels is None or not choice.chunks(labels.numel()):
            return cls.forward(self, *args, **kwargs)
        owner = self.get_submodule(above)
        # Attributes of the object come before its modules.
        owner.__dict__[name] = _StandIn(cast(nn.Module, owner._modules[name]))
        try:
            output = cls.forward(self, *args, **kwargs)
        finally:
            del owner.__dict__[name]
        if isinstance(output, Mapping) and isinstance(output.get("logits"), LazyLogits):
            return type(output)(**{k: v for k, v in output.items() if k != "logits"})
        return output

    return forward


__all__ = ["LOGIT_COPIES", "LossChoice", "Mode", "token_mean", "use_token_loss"]
