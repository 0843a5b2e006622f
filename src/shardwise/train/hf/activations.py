"""What autograd saves in a forward, counted on the meta device: bytes, before there are any.

Every tensor that autograd packs is counted once by its storage, parameters left out, and to the
unit that runs. So it holds for any model and attention, and needs no formula; models that look at
values, which meta tensors have not, are guessed by their sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.train.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd saves in the forward of one sample: bytes inside of each unit, and of what goes
    into them; outside of all; and the logits' elements."""

    inside: tuple[int, ...]
    inputs: int
    outside: int
    logits: int
    is_known: bool = True

    def activations(self, checkpointing: str) -> int:
        if checkpointing == "full" and self.inside:
            return self.inputs + max(self.inside) + self.outside
        return sum(self.inside) + self.outside


def count_saved(model: Any, units: Sequence[nn.Module], seq_len: int) -> Saved:
    """One forward on meta of a sample of `seq_len` tokens, through a model of transformers or the
    built-in decoder."""
    counter = _Counter(model, units)
    was_training = model.training
    model.train()
    try:
        with counter.counting():
            logits = on_meta_ids(model, seq_len).numel()
    except Exception:  # noqa: BLE001 - some models look at values, which meta tensors have not
        return _guessed(model, seq_len)
    finally:
        model.train(was_training)
    return Saved(tuple(counter.inside), sum(counter.inputs), counter.outside, logits)


def on_meta_ids(model: Any, seq_len: int) -> Tensor:
    """The logits of one sample, on meta."""
    ids = torch.zeros((1, seq_len), dtype=torch.long, device="meta")
    with _buffers_on_meta(model):
        return _logits(model, ids)


def _logits(model: Any, ids: Tensor) -> Tensor:
    if isinstance(model, Decoder):
        return model.logits(ids)
    # With a mask of four dims nobody looks into positions for documents.
    mask = torch.ones((1, 1, ids.shape[1], ids.shape[1]), dtype=torch.bool, device="meta")
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def _guessed(model: Any, seq_len: int) -> Saved:
    """By the sizes of a usual decoder layer: about 16 times its width and 4 times its hidden one a
    token."""
    config = model.config.get_text_config()
    width = config.hidden_size
    hidden = getattr(config, "intermediate_size", None) or 4 * width
    layers = config.num_hidden_layers
    per_layer = seq_len * (16 * width + 4 * hidden) * 4
    inputs = layers * seq_len * width * 4
    logits = seq_len * config.vocab_size
    return Saved((per_layer,) * layers, inputs, seq_len * width * 8, logits, is_known=False)


class _Counter:
    """Bytes of what autograd saves, each storage once, parameters left out."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module]) -> None:
        self.inside, self.inputs, self.outside = [0] * len(units), [0] * len(units), 0
        self._units, self._at = units, -1
        held = [*model.parameters(), *model.buffers()]
        self._seen = {_storage(t) for t in held}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        handles = []
        for number, unit in enumerate(self._units):

            def enter(_module: nn.Module, args: Any, kwargs: Any, number: int = number) -> None:
                self._at = number
                tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
                first = next((t for t in tensors if t.is_floating_point()), None)
                self.inputs[number] = first.nbytes if first is not None else 0

            def leave(*_: Any) -> None:
                self._at = -1

            handles.append(unit.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(unit.register_forward_hook(leave))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _pack(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in self._seen:
            self._seen.add(key)
            size = tensor.untyped_storage().nbytes()
            if self._at < 0:
                self.outside += size
            else:
                self.inside[self._at] += size
        return tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def _buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Tables are on the CPU; for one forward on meta they are there too."""
    held = [(m, k, b) for m in model.modules() for k, b in m._buffers.items() if b is not None]
    try:
        for module, key, buffer in held:
            module._buffers[key] = buffer.to("meta")
        yield
    finally:
        for module, key, buffer in held:
            module._buffers[key] = buffer
