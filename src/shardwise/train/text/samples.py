"""Rows of documents as batches, read from the mapped arrays by index.

A batch is as long as its longest row, rounded up: what is left of the others is padding, which is a
document of its own and is not trained.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardwise.train.order import Int64Array
from shardwise.train.text.store import Store

IGNORED = -100  # what the losses of torch and transformers leave out
_MULTIPLE = 8  # of which the length of a batch is one, where the limit allows it


class TextSamples:
    """The rows of one part of a store."""

    def __init__(self, store: Store, part: str, seq_len: int) -> None:
        self._tokens, self._trained = store.tokens, store.trained
        self._documents = store.arrays["documents"]
        self._rows, self._ends = store.arrays[f"{part}_rows"], store.arrays[f"{part}_ends"]
        self._counts = store.arrays[f"{part}_counts"]
        self._pad, self._seq_len = store.info["pad"], seq_len

    def __len__(self) -> int:
        return len(self._ends)

    def trained_tokens(self, indices: Int64Array) -> int:
        return int(self._counts[indices].sum())

    def documents(self, index: int) -> list[tuple[Int64Array, Int64Array]]:
        """Tokens and labels of each document of a row."""
        start = int(self._ends[index - 1]) if index else 0
        return [self._document(int(d)) for d in self._rows[start : int(self._ends[index])]]

    def _document(self, document: int) -> tuple[Int64Array, Int64Array]:
        start = int(self._documents[document - 1]) if document else 0
        end = int(self._documents[document])
        tokens = self._tokens[start:end].astype(np.int64)
        labels = np.where(self._trained[start:end], tokens, IGNORED)
        labels[0] = IGNORED  # of what stands before it, the loss would ask the document before
        return tokens, labels

    def batch(self, indices: Int64Array) -> dict[str, Tensor]:
        rows = [self.documents(int(index)) for index in indices]
        return as_batch(rows, self._pad, self._seq_len)


def width_of(longest: int, seq_len: int) -> int:
    """The length of a batch whose longest row has `longest` tokens."""
    return min(seq_len, -(-longest // _MULTIPLE) * _MULTIPLE)


def as_batch(
    rows: list[list[tuple[Int64Array, Int64Array]]], pad: int, seq_len: int
) -> dict[str, Tensor]:
    """Rows of (tokens, labels) as `input_ids`, `labels` and `position_ids`, int64 [B, T]."""
    longest = max(sum(len(tokens) for tokens, _ in row) for row in rows)
    width = width_of(longest, seq_len)
    shape = (len(rows), width)
    input_ids = np.full(shape, pad, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    for at, row in enumerate(rows):
        end = 0
        for tokens, targets in row:
            start, end = end, end + len(tokens)
            input_ids[at, start:end], labels[at, start:end] = tokens, targets
            positions[at, start:end] = np.arange(len(tokens))
        positions[at, end:] = np.arange(width - end)
    found = {"input_ids": input_ids, "labels": labels, "position_ids": positions}
    return {name: torch.from_numpy(array) for name, array in found.items()}
