"""Files from the host that has them to one that lacks them, over the ranks' process group.

All ranks know all moves. Piece by piece, in the same order everywhere: a rank asks for the next
piece of each file that comes to it, hands out the next of each that goes from it, and waits for all
of these; so nobody waits in a circle, and a piece per file is all that is held in memory. What
arrives is written with checksums, which must be those of the file, and gets its name last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.files import CheckedFile, CheckedWriter, FileEntry
from shardwise.checkpoint.placement import storage_bytes
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.source import PIECE_BYTES
from shardwise.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Move:
    """A file that the rank `source` can read, to be written where the rank `target` can write."""

    name: str
    entry: FileEntry
    source: int
    target: int


def move_files(moves: Sequence[Move], ranks: Ranks, folder: Path) -> None:
    """Carries out moves between the folders of the ranks, `folder` on this one. Collective: all
    ranks name the same moves. CheckpointError on all of them if one could not be done."""
    if moves:
        ranks.on_each(lambda: _move(moves, ranks, folder))


def _move(moves: Sequence[Move], ranks: Ranks, folder: Path) -> None:
    ends: list[_Outgoing | _Incoming] = []
    for tag, move in enumerate(moves):
        if move.source == ranks.rank:
            ends.append(_Outgoing(move, folder, ranks, tag))
        elif move.target == ranks.rank:
            ends.append(_Incoming(move, folder, ranks, tag))
    for piece in range(max((end.num_pieces for end in ends), default=0)):
        started = [(end, *end.start(piece)) for end in ends if piece < end.num_pieces]
        for end, work, buffer in started:
            work.wait()
            end.end(buffer)
    for end in ends:
        end.finish()
    for end in ends:
        if end.trouble is not None:
            raise end.trouble


class _End:
    """One side of a move. What fails here is raised at the end: the other side waits for all
    pieces."""

    def __init__(self, move: Move, folder: Path, ranks: Ranks, tag: int) -> None:
        self.move, self.path = move, folder / move.name
        self.group, self.tag = ranks.group, tag
        self.trouble: CheckpointError | None = None

    @property
    def num_pieces(self) -> int:
        return -(-self.move.entry.size_bytes // PIECE_BYTES)

    def buffer(self, piece: int) -> Tensor:
        left = self.move.entry.size_bytes - piece * PIECE_BYTES
        return torch.zeros(min(PIECE_BYTES, left), dtype=torch.uint8)

    def failed(self, error: OSError | CheckpointError) -> None:
        if isinstance(error, OSError):
            error = CheckpointError(f"{self.path}: cannot be written: {error.strerror}")
        self.trouble = self.trouble or error


class _Outgoing(_End):
    """Reads without the checksums: they are compared where the bytes arrive."""

    def __init__(self, move: Move, folder: Path, ranks: Ranks, tag: int) -> None:
        super().__init__(move, folder, ranks, tag)
        self._file: CheckedFile | None = None
        try:
            self._file = CheckedFile(self.path)
        except CheckpointError as error:
            self.failed(error)

    def start(self, piece: int) -> tuple[Any, Tensor]:
        buffer = self.buffer(piece)
        try:
            if self._file is not None and self.trouble is None:
                self._file.read_into(piece * PIECE_BYTES, storage_bytes(buffer))
        except CheckpointError as error:
            self.failed(error)
        work = dist.isend(buffer, group=self.group, tag=self.tag, group_dst=self.move.target)
        return work, buffer

    def end(self, buffer: Tensor) -> None:
        """The buffer was kept until it was sent."""

    def finish(self) -> None:
        if self._file is not None:
            self._file.close()


class _Incoming(_End):
    """Writes under another name until the last byte is there and right."""

    def __init__(self, move: Move, folder: Path, ranks: Ranks, tag: int) -> None:
        super().__init__(move, folder, ranks, tag)
        self._draft = folder / f".coming_{move.name}"
        self._writer: CheckedWriter | None = None
        try:
            self._writer = CheckedWriter(self._draft, move.entry.size_bytes)
        except OSError as error:
            self.failed(error)

    def start(self, piece: int) -> tuple[Any, Tensor]:
        buffer = self.buffer(piece)
        work = dist.irecv(buffer, group=self.group, tag=self.tag, group_src=self.move.source)
        return work, buffer

    def end(self, buffer: Tensor) -> None:
        try:
            if self._writer is not None and self.trouble is None:
                self._writer.write(storage_bytes(buffer))
        except OSError as error:
            self.failed(error)

    def finish(self) -> None:
        if self.trouble is None and self._writer is not None:
            if self._writer.finish() != self.move.entry:
                text = f"{self.path}: other bytes arrived than rank {self.move.source} has"
                self.failed(CheckpointError(text))
            else:
                self._draft.rename(self.path)
        if self.trouble is not None:
            if self._writer is not None:
                self._writer.abandon()
            self._draft.unlink(missing_ok=True)
