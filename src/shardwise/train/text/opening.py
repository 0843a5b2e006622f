"""`open_texts`: the samples of a job whose data are texts, and what to say of them in a line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.train.config import Config
from shardwise.train.data import Data
from shardwise.train.order import Int64Array, SampleOrder
from shardwise.train.text.keys import overlong_of
from shardwise.train.text.samples import TextSamples, width_of
from shardwise.train.text.store import PARTS, Store, open_store
from shardwise.units import counted


@dataclass(frozen=True, slots=True)
class Figures:
    """What the parts of a store hold."""

    documents: tuple[int, int]
    rows: tuple[int, int]
    tokens: tuple[int, int]
    trained: tuple[int, int]
    padding: float
    """Share of the places in the micro-batches of the first epoch that no document has."""

    @property
    def trained_share(self) -> float:
        return sum(self.trained) / sum(self.tokens)


def open_texts(config: Config) -> Data:
    """The samples that `config.data` names."""
    store = open_store(config)
    train, held_out = (TextSamples(store, part, config.data.seq_len) for part in PARTS)
    figures = figures_of(store, config)
    return Data(
        train=train,
        held_out=held_out if len(held_out) else None,
        unit="token",
        units_per_sample=round(sum(figures.tokens) / sum(figures.rows)),
        fingerprint=store.info["fingerprint"],
        notes=(sentence_of(store, figures, config),),
        largest_token=store.info["largest_token"],
        longest=store.info["longest"],
    )


def figures_of(store: Store, config: Config) -> Figures:
    """Counts of documents, rows and tokens; padding as training batches have it on the whole."""
    lengths = [row_lengths(store, part) for part in PARTS]

    def both(values: Iterable[Any]) -> tuple[int, int]:
        first, second = values
        return int(first), int(second)

    return Figures(
        documents=both(len(store.arrays[f"{part}_rows"]) for part in PARTS),
        rows=both(len(part) for part in lengths),
        tokens=both(part.sum() for part in lengths),
        trained=both(store.arrays[f"{part}_counts"].sum() for part in PARTS),
        padding=_padding(lengths[0], config),
    )


def _padding(lengths: Int64Array, config: Config) -> float:
    order = SampleOrder(len(lengths), config.run.seed).indices(0, len(lengths))
    micro = min(config.train.micro_batch, len(lengths))
    batches = lengths[order[: len(lengths) // micro * micro]].reshape(-1, micro)
    places = sum(width_of(int(longest), config.data.seq_len) for longest in batches.max(axis=1))
    return 1 - float(batches.sum()) / (places * micro)


def document_lengths(store: Store) -> Int64Array:
    """Tokens of each document."""
    return np.diff(store.arrays["documents"], prepend=0)


def row_lengths(store: Store, part: str) -> Int64Array:
    """Tokens of each row, without padding."""
    rows, ends = store.arrays[f"{part}_rows"], store.arrays[f"{part}_ends"]
    sums = np.concatenate([[0], np.cumsum(document_lengths(store)[rows])])
    return np.diff(sums[np.concatenate([[0], ends])])


def sentence_of(store: Store, figures: Figures, config: Config) -> str:
    """One line about all of it, with what was left out."""
    counts, info = store.info["counts"], store.info
    text = (
        f"data: {counted(sum(figures.documents), 'document')} of {info['files']} "
        f"({figures.documents[1]:,} held out), {counted(sum(figures.tokens), 'token')}, "
        f"{figures.trained_share:.0%} trained"
    )
    if config.data.packing:
        text += (
            f"; packed into {counted(sum(figures.rows), 'row')} of {config.data.seq_len}, "
            f"{figures.padding:.1%} padding"
        )
    return "; ".join([text, *left_out(counts, config)])


def left_out(counts: dict[str, int], config: Config) -> list[str]:
    """What was truncated, dropped, split or skipped; nothing of what was not."""
    limit, how = config.data.seq_len, overlong_of(config.data)
    texts = {
        "truncated": f"truncated to {limit} tokens",
        "dropped": f"dropped, longer than {limit} tokens",
        "split": f"split into pieces of at most {limit} tokens",
        "untrained": "dropped, without a trained token"
        + (f" within {limit}" if how == "truncate" else ""),
        "skipped": "skipped (data.invalid)",
    }
    return [f"{counts[name]:,} {text}" for name, text in texts.items() if counts[name]]
