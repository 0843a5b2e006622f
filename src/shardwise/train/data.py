"""What a training step reads: samples by index, from tokens or from a user's own datasets.

    data.source = "stdlib" | paths        sequences of seq_len + 1 tokens (int64 [B, seq_len + 1])
    data.format = "text" | "chat" | ...   documents in rows, a dict of tensors (see `text`)
    data.source = "module:function"       function(section) -> (train, held_out) map-style datasets
                                          (`__len__`, `__getitem__`; held_out may be None); samples
                                          are put together by torch's `default_collate`

Neighbouring sequences share one token: the last target of one is the first input of the next. Which
samples a rank reads is `order.py`'s matter; nothing here keeps a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from shardwise.errors import ConfigError
from shardwise.train.config import Config, CustomModelConfig, HFModelConfig, is_factory
from shardwise.train.corpus import Tokens, open_corpus
from shardwise.train.factory import load_factory
from shardwise.train.order import Int64Array
from shardwise.train.text.keys import has_texts


class Samples(Protocol):
    """Random access to a fixed number of samples."""

    def __len__(self) -> int: ...

    def batch(self, indices: Int64Array) -> Any:
        """The samples of these indices as one batch on the CPU."""
        ...

    def trained_tokens(self, indices: Int64Array) -> int | None:
        """How many tokens of these samples have a loss, without reading them: labels that are not
        -100, at the place of their own token, the first place left out. None: not known so."""
        ...


@dataclass(frozen=True, slots=True)
class Data:
    """`unit` is what loss and speed count: byte, token or sample; `units_per_sample` how many a
    sample has."""

    train: Samples
    held_out: Samples | None
    unit: str
    units_per_sample: int
    fingerprint: str
    notes: tuple[str, ...] = ()
    """What to tell of it beside its size."""
    largest_token: int = -1
    """That it holds; -1 where that is not known before it is read."""
    longest: int = 0
    """Tokens of its longest document; 0 where it has none."""


class TokenSamples:
    """Sequences of `seq_len` + 1 tokens, cut from arrays; none crosses from one array to the
    next."""

    def __init__(self, arrays: tuple[Tokens, ...], seq_len: int, vocab_size: int | None) -> None:
        self._arrays, self._seq_len, self._vocab_size = arrays, seq_len, vocab_size
        counts = [max(0, (a.size - 1) // seq_len) for a in arrays]
        self._ends = np.cumsum(counts) if counts else np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def batch(self, indices: Int64Array) -> torch.Tensor:
        rows = np.empty((len(indices), self._seq_len + 1), dtype=np.int64)
        which = np.searchsorted(self._ends, indices, side="right")
        for row, index, i in zip(rows, indices, which, strict=True):
            first = int(index - (self._ends[i - 1] if i else 0)) * self._seq_len
            row[:] = self._arrays[i][first : first + self._seq_len + 1]
        if self._vocab_size is not None and rows.size and rows.max() >= self._vocab_size:
            raise ConfigError(
                f"data.source: holds token {rows.max()}, but the model knows tokens below "
                f"{self._vocab_size}; raise model.vocab_size, or use the model's own tokenizer"
            )
        if rows.size and rows.min() < 0:
            raise ConfigError(f"data.source: holds the negative token {rows.min()}")
        return torch.from_numpy(rows)

    def trained_tokens(self, indices: Int64Array) -> int:
        return len(indices) * self._seq_len


class DatasetSamples:
    """A map-style dataset, read by index."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: Int64Array) -> Any:
        return torch.utils.data.default_collate([self._dataset[int(i)] for i in indices])

    def trained_tokens(self, indices: Int64Array) -> None:
        return None


def open_data(config: Config, search_dir: Path | None) -> Data:
    """Opens what `config.data` names; `search_dir` is where a user's module may lie beside its
    config."""
    source = config.data.source
    if isinstance(source, str) and is_factory(source):
        data = _open_datasets(source, config, search_dir)
    elif has_texts(config.data):
        from shardwise.train.text.opening import open_texts

        data = open_texts(config)
    else:
        data = _open_tokens(config)
    if len(data.train) < config.train.global_batch:
        raise ConfigError(
            f"data.source: the training part has {len(data.train)} samples, fewer than "
            f"train.global_batch = {config.train.global_batch}; use more data, shorter sequences "
            "or a smaller batch"
        )
    if data.held_out is not None and not len(data.held_out):
        raise ConfigError(
            f"data.held_out: {config.data.held_out} of the data is shorter than one sequence; "
            "use a larger share"
        )
    return data


def _open_tokens(config: Config) -> Data:
    section = config.data
    corpus = open_corpus(
        section.source,
        held_out=section.held_out,
        token_dtype=section.token_dtype,
        fallback_dir=Path(config.run.dir) / "cache",
    )
    vocab_size = _vocab_size(config)
    if corpus.unit == "byte" and isinstance(config.model, HFModelConfig):
        _check_bytes(config.model)
    if corpus.unit == "byte" and vocab_size is not None and vocab_size < 256:
        raise ConfigError(f"model.vocab_size: {vocab_size} cannot hold bytes; use 256")
    train, held_out = (
        TokenSamples(arrays, section.seq_len, vocab_size)
        for arrays in (corpus.train, corpus.held_out)
    )
    fingerprint = f"{corpus.fingerprint} seq_len={section.seq_len}"
    return Data(train, held_out, corpus.unit, section.seq_len, fingerprint)


def _check_bytes(section: HFModelConfig) -> None:
    """A model with a vocabulary of its own would take bytes for other words."""
    from shardwise.train.hf.description import describe

    if describe(section).has_weights:
        raise ConfigError(
            "data.source: is text, whose bytes are no tokens of the model; set data.format = "
            "'text' (or chat, instruction), or name files of its tokens (.npy, .bin)"
        )


def _vocab_size(config: Config) -> int | None:
    """How many tokens the model knows; None where only the model can tell."""
    if isinstance(config.model, CustomModelConfig):
        return None
    if isinstance(config.model, HFModelConfig):
        from shardwise.train.hf.description import describe

        return describe(config.model).vocab_size
    return config.model.vocab_size


def _open_datasets(source: str, config: Config, search_dir: Path | None) -> Data:
    made = load_factory("data.source", source, search_dir)({"source": source})
    if (
        not isinstance(made, tuple)
        or len(made) != 2
        or not all(d is None or (hasattr(d, "__len__") and hasattr(d, "__getitem__")) for d in made)
    ):
        raise ConfigError(
            f"data.source: {source} must return two datasets, (train, held_out), "
            "with __len__ and __getitem__"
        )
    train, held_out = made
    held = None if held_out is None else DatasetSamples(held_out)
    fingerprint = (
        f"{source} train={len(train)} held_out={len(held_out) if held_out is not None else 0}"
    )
    return Data(DatasetSamples(train), held, "sample", 1, fingerprint)
