"""Tokenised documents and the rows that they are packed into: made once, then memory-mapped.

    tokens.bin     all documents, one behind the other        trained.bin   which have a loss
    documents.bin  the end of each document in them
    train_rows.bin, held_out_rows.bin        documents of each row, row by row
    train_ends.bin, held_out_ends.bin        the end of each row in that
    train_counts.bin, held_out_counts.bin    trained tokens of each row

The folder is named by the contents of the files, the tokenizer and the settings, so that a file
that was moved is found and one that was changed is not. Held out are whole documents, chosen by a
hash of their tokens: equal ones are on the same side. Of a few long texts the end is held out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.train.cache import cache_root, cached
from shardwise.train.config import Config, DataConfig
from shardwise.train.order import Int64Array, SampleOrder
from shardwise.train.text import packing
from shardwise.train.text.files import Place, RecordError, find_files, read_records
from shardwise.train.text.keys import fields_of, overlong_of, settings_of
from shardwise.train.text.messages import Reader
from shardwise.train.text.spans import ChatEncoder, Encoded, TextEncoder
from shardwise.train.text.tokenizer import MISSING, TokenizerFiles, find_tokenizer, load_tokenizer

_FORMAT = 1  # raise it when the same files and settings give other tokens or rows
_BATCH, _BATCH_CHARACTERS = 1000, 4_000_000  # that are tokenised at once, in threads
_FEW_TEXTS = 20  # below, a held-out one could be most of the data
_TELL_S = 10.0
PARTS = ("train", "held_out")
_ARRAYS: dict[str, str] = {"documents": "int64"} | {
    f"{part}_{name}": "int64" for part in PARTS for name in ("rows", "ends", "counts")
}


@dataclass(frozen=True, slots=True)
class Store:
    """The arrays of a folder, and what its builder says."""

    tokens: NDArray[Any]
    trained: NDArray[np.bool_]
    arrays: dict[str, Int64Array]
    info: dict[str, Any]


def open_store(config: Config) -> Store:
    """Finds what `config.data` means tokenised, or tokenises it; other processes wait meanwhile."""
    data = config.data
    tokenizer = find_tokenizer(config)
    files = find_files(data.source, data.format)
    key = [_FORMAT, [_digest(file) for file in files], tokenizer.digest, settings_of(data)]
    name = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).hexdigest()
    folder = cache_root(Path(config.run.dir).expanduser() / "cache") / name
    info = cached(folder, lambda work: _Builder(data, tokenizer, files, work).run(), _tell_waiting)
    return Store(
        tokens=_map(folder / "tokens.bin", info["dtype"]),
        trained=_map(folder / "trained.bin", "bool"),
        arrays={name: _map(folder / f"{name}.bin", kind) for name, kind in _ARRAYS.items()},
        info=info,
    )


def _digest(file: Path) -> str:
    digest = hashlib.blake2b(f"{file.suffixes[-2:]}".encode(), digest_size=16)
    try:
        with file.open("rb") as stream:
            while block := stream.read(2**22):
                digest.update(block)
    except OSError as error:
        text = f"data.source: {file}: cannot be read: {error.strerror}"
        raise ConfigError(text) from None
    return digest.hexdigest()


def _map(file: Path, dtype: str) -> NDArray[Any]:
    if not file.stat().st_size:  # which cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")


def _tell_waiting() -> None:
    if os.environ.get("RANK", "0") == "0":
        print("data: another process tokenises it; waiting for that", flush=True)


@dataclass(slots=True)
class _Builder:
    """Reads, tokenises and packs everything; `run` returns what is to be said of it."""

    data: DataConfig
    tokenizer: TokenizerFiles
    files: list[Path]
    work: Path
    counts: dict[str, int] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    num_trained: list[int] = field(default_factory=list)
    groups: list[bytes] = field(default_factory=list)  # pieces of one text share one
    end: int = 0
    largest: int = 0
    skipped: str = ""
    digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def run(self) -> dict[str, Any]:
        self.counts = dict.fromkeys(("read", "skipped", "truncated", "dropped", "split"), 0)
        self.counts["untrained"] = 0
        print(f"data: tokenising {_named(self.files)}", flush=True)
        chats = self.data.format != "text"
        tokenizer = load_tokenizer(self.tokenizer, needs_template=chats)
        encode = ChatEncoder(tokenizer) if chats else TextEncoder(tokenizer)
        dtype = "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "uint32"
        with (
            (self.work / "tokens.bin").open("wb") as tokens,
            (self.work / "trained.bin").open("wb") as trained,
        ):
            for place, found in self._encoded(encode):
                for piece, group in self._cut(place, found):
                    tokens.write(piece.tokens.astype(dtype).tobytes())
                    trained.write(piece.trained.tobytes())
                    self._take(piece, group)
        shutil.rmtree(self.work / "datasets", ignore_errors=True)
        if not self.ends:
            raise ConfigError(self.skipped or f"data.source: {self._nothing_left()}")
        self._save("documents", self.ends)
        for part, rows in zip(PARTS, self._rows(), strict=True):
            self._write_rows(part, rows)
        lengths = np.diff(self.ends, prepend=0)
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return {
            "fingerprint": self.digest.hexdigest(),
            "dtype": dtype,
            "pad": next(int(pad) for pad in pads if pad is not None),
            "largest_token": self.largest,
            "longest": int(lengths.max()),
            "counts": self.counts,
            "files": _named(self.files),
        }

    def _encoded(self, encode: Any) -> Iterator[tuple[Place, Encoded]]:
        """Documents, with the records left out that `data.invalid` passes by."""
        batch: list[tuple[Place, Any]] = []
        characters, told = 0, time.monotonic()
        for item in self._items():
            batch.append(item)
            characters += _size(item[1])
            if len(batch) < _BATCH and characters < _BATCH_CHARACTERS:
                continue
            yield from self._valid(batch, encode(batch))
            batch, characters = [], 0
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                print(f"data: {self.counts['read']:,} records are tokenised", flush=True)
        if batch:
            yield from self._valid(batch, encode(batch))

    def _items(self) -> Iterator[tuple[Place, Any]]:
        """Texts or chats with their places."""
        reader = Reader(self.data.format, fields_of(self.data), self.data.system)
        read = reader.text if self.data.format == "text" else reader.chat
        locks = self.work / "datasets"
        try:
            import datasets  # noqa: F401 - is it there?
        except ImportError:
            raise ConfigError(f"data.format: {MISSING}") from None
        for file in self.files:
            for record in read_records(file, reader.fields.get("text", ""), locks):
                self.counts["read"] += 1
                if isinstance(record, RecordError):
                    self._pass_by(record)
                    continue
                try:
                    yield record.place, read(record)
                except RecordError as error:
                    self._pass_by(error)

    def _valid(
        self, batch: list[tuple[Place, Any]], found: list[Encoded | RecordError]
    ) -> Iterator[tuple[Place, Encoded]]:
        for (place, _), result in zip(batch, found, strict=True):
            if isinstance(result, RecordError):
                self._pass_by(result)
            else:
                yield place, result

    def _pass_by(self, error: RecordError) -> None:
        if self.data.invalid == "refuse":
            hint = 'data.invalid = "skip" passes such records by'
            raise ConfigError(f"{error}; mend it, or {hint}") from None
        self.counts["skipped"] += 1
        self.skipped = self.skipped or f"{error}; no record can be used"

    def _cut(self, place: Place, found: Encoded) -> Iterator[tuple[Encoded, bytes]]:
        """As `data.overlong` says; nothing of what has no trained token."""
        limit, how, size = self.data.seq_len, overlong_of(self.data), len(found.tokens)
        group = hashlib.blake2b(found.tokens.tobytes() + found.trained.tobytes(), digest_size=8)
        pieces = [found]
        if size > limit:
            if how == "refuse":
                raise ConfigError(
                    f"data.source: {place}: has {size} tokens, data.seq_len is {limit}; raise it, "
                    "or let data.overlong truncate or drop such samples"
                )
            self.counts[{"truncate": "truncated", "drop": "dropped", "split": "split"}[how]] += 1
            if how == "drop":
                return
            # The last token of a piece is the first of the next, which does not train it.
            starts = range(0, size - 1, limit - 1) if how == "split" else [0]
            pieces = [
                Encoded(found.tokens[s : s + limit], found.trained[s : s + limit]) for s in starts
            ]
        for piece in pieces:
            if piece.num_trained:
                yield piece, group.digest()
            else:
                self.counts["untrained"] += 1

    def _take(self, piece: Encoded, group: bytes) -> None:
        self.end += len(piece.tokens)
        self.ends.append(self.end)
        self.num_trained.append(piece.num_trained)
        self.groups.append(group)
        self.largest = max(self.largest, int(piece.tokens.max()))
        self.digest.update(len(piece.tokens).to_bytes(8, "little"))
        self.digest.update(piece.tokens.tobytes() + piece.trained.tobytes())

    def _nothing_left(self) -> str:
        counts = self.counts
        if not counts["read"]:
            return f"{_named(self.files)}: there is no record in it"
        return (
            f"no sample is left of {counts['read']:,}: {counts['dropped']:,} are longer than "
            f"data.seq_len = {self.data.seq_len}, {counts['untrained']:,} have no trained token "
            "within it; raise it"
        )

    def _rows(self) -> tuple[list[list[int]], list[list[int]]]:
        """Documents of the rows of both parts. Documents are packed in an order that is mixed once:
        neighbours in a file are often alike."""
        mixed = SampleOrder(len(self.ends), seed=0).indices(0, len(self.ends))
        held_out = self._held_out()
        lengths = np.diff(self.ends, prepend=0)
        parts = []
        for chosen in (~held_out, held_out):
            documents = mixed[chosen[mixed]]
            if self.data.packing:
                rows = packing.first_fit(lengths[documents].tolist(), self.data.seq_len)
            else:
                rows = packing.one_each(len(documents))
            parts.append([documents[row].tolist() for row in rows])
        return parts[0], parts[1]

    def _held_out(self) -> NDArray[np.bool_]:
        count, share = len(self.ends), self.data.held_out
        wanted = max(1, round(count * share)) if share else 0
        names = sorted(set(self.groups))
        if share and (count < 2 or (len(names) < 2 and self.data.format != "text")):
            what = "a single sample" if count < 2 else f"{count:,} samples that are all equal"
            raise ConfigError(
                f"data.held_out: {what} cannot be cut into two parts; give more data, or set it to "
                "0"
            )
        if self.data.format == "text" and len(names) < _FEW_TEXTS:
            return np.arange(count) >= count - min(wanted, count - 1)
        sizes = dict.fromkeys(names, 0)
        for name in self.groups:
            sizes[name] += 1
        chosen: set[bytes] = set()
        for name in names[:-1]:  # hashes, so their order is as good as a draw
            if wanted <= 0:
                break
            chosen.add(name)
            wanted -= sizes[name]
        return np.array([name in chosen for name in self.groups])

    def _write_rows(self, part: str, rows: list[list[int]]) -> None:
        documents, ends = packing.flat(rows)
        counts = [sum(self.num_trained[d] for d in row) for row in rows]
        self._save(f"{part}_rows", documents)
        self._save(f"{part}_ends", ends)
        self._save(f"{part}_counts", counts)
        self.digest.update(documents.tobytes() + ends.tobytes())

    def _save(self, name: str, values: Any) -> None:
        np.asarray(values, dtype=np.int64).tofile(self.work / f"{name}.bin")


def _size(item: Any) -> int:
    return len(item) if isinstance(item, str) else sum(len(m["content"]) for m in item)


def _named(files: list[Path]) -> str:
    return files[0].name if len(files) == 1 else f"{len(files)} files ({files[0].name} ...)"
