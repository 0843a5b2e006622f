"""What a micro-batch weighs: by its trained tokens where batches say which these are, else equally.

A model returns the mean over the trained tokens of one micro-batch; micro-batches hold unequal
numbers of them. So the loss of a step is

    sum over all micro-batches of   mean_i * tokens_i / total        total: tokens of the whole step

whatever the ranks, micro-batches and accumulation, and so is its gradient. The total is known
before the first backward, since sharded gradients are reduced with every micro-batch: from samples
that know it, on every rank without an exchange, else from the batches themselves. Micro-batches
without such labels weigh the same each, which is the mean over samples.

Labels are those of causal language models in transformers' convention: at the same place as the
inputs (the target of place t is `labels[t + 1]`), -100 where nothing is trained. Source of the
problem: Hugging Face's "fixing gradient accumulation" (2024).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from shardwise.checkpoint.ranks import Ranks
from shardwise.engine.reproducible.run import set_streams, stream_seed
from shardwise.train.calling import is_causal_lm
from shardwise.train.order import Int64Array

if TYPE_CHECKING:
    from shardwise.train.data import Samples
    from shardwise.train.tensor_axis import DataRanks

NOT_TRAINED = -100

# A batch to what its loss is multiplied by before the backward.
Weigh = Callable[[Any], float]


def trained_tokens(model: nn.Module, batch: Any) -> int | None:
    """Targets of a batch that count in the loss; None where the batch does not say."""
    if not isinstance(batch, Mapping) or not is_causal_lm(model):
        return None
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.ndim < 1:
        return None
    return int((labels[..., 1:] != NOT_TRAINED).sum())


def weigh_on_ranks(
    model: nn.Module,
    samples: Samples,
    own: Sequence[Int64Array],
    step: Int64Array,
    ranks: Ranks,
    data_ranks: DataRanks,
) -> tuple[Iterable[Any], Weigh]:
    """The batches of this rank's micro-batches `own`, and their weights, for gradients that are
    averaged over data ranks; `step` holds the indices of all. A collective where samples do not
    know their tokens."""
    batches: Iterator[Any] = (samples.batch(indices) for indices in own)
    first = next(batches)
    if trained_tokens(model, first) is None:
        return itertools.chain([first], batches), lambda batch: 1 / len(own)
    total, read = samples.trained_tokens(step), [first, *batches]
    if total is None:
        counted = sum(_tokens(model, batch) for batch in read)
        total = int(data_ranks.rows(ranks.gather_floats([counted])).sum())
    return read, _by_tokens(model, data_ranks.size, total)


def weigh_in_tree(
    model: nn.Module,
    samples: Samples,
    micro_batches: Sequence[Int64Array],
    ranks: Ranks,
    seed: int,
    step: int,
) -> Weigh:
    """The same where gradients are averaged over all `micro_batches` of the step, and any rank may
    run any of them: weights are the same on any number of ranks."""
    if not is_causal_lm(model):
        return lambda batch: 1.0
    known, divisor = samples.trained_tokens(np.concatenate(micro_batches)), len(micro_batches)
    if known is not None:  # then nothing is read for that
        weigh = _by_tokens(model, divisor, known)
        return lambda batch: 1.0 if trained_tokens(model, batch) is None else weigh(batch)
    if trained_tokens(model, samples.batch(micro_batches[0][:1])) is None:
        return lambda batch: 1.0
    counted = 0
    for index in range(ranks.rank, len(micro_batches), ranks.world_size):
        set_streams(stream_seed(seed, step, index))  # as for the micro-batch itself
        counted += _tokens(model, samples.batch(micro_batches[index]))
    total = int(ranks.gather_floats([counted]).sum())
    return _by_tokens(model, divisor, total)


def _by_tokens(model: nn.Module, divisor: int, total: int) -> Weigh:
    """`divisor`: what the engine divides sums of gradients by."""
    return lambda batch: _tokens(model, batch) * divisor / max(1, total)


def _tokens(model: nn.Module, batch: Any) -> int:
    count = trained_tokens(model, batch)
    assert count is not None, "batches of one data set either all have labels, or none has"
    return count
