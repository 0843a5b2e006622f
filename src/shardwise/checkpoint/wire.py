"""Files from the host that has them to one that lacks them, over the ranks' process group.

All ranks know all moves. Piece by piece, in the same order everywhere: a rank asks for the next
piece of each file that comes to it, hands out the next of each that goes from it, and waits for all
of these; so nobody waits in a circle, and a piece per file is all that is held in memory. What
arrives is written with checksums, which must be those of the file, and gets its name last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.checkpoint.files import CheckedFile, CheckedWriter, FileEntry
from shardwise.checkpoint.placement import storage_bytes
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.source import PIECE_BYTES
from shardwise.comm.waits import Told
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
        ranks.on_each(lambda: _Transfer(moves, ranks, folder).run())


class _Transfer:
    """This rank's ends of the moves, by their numbers. What fails waits for the end: peers wait for
    all pieces, whatever is in them."""

    def __init__(self, moves: Sequence[Move], ranks: Ranks, folder: Path) -> None:
        self._group, self._folder = ranks.group, folder
        numbered = list(enumerate(moves))
        self._outgoing = [(tag, move) for tag, move in numbered if move.source == ranks.rank]
        self._incoming = [(tag, move) for tag, move in numbered if move.target == ranks.rank]
        self._readers: dict[int, CheckedFile] = {}
        self._writers: dict[int, CheckedWriter] = {}
        self._troubles: list[CheckpointError] = []

    def run(self) -> None:
        for tag, move in self._outgoing:  # without checksums: they are compared on arrival
            with self._collecting(move):
                self._readers[tag] = CheckedFile(self._folder / move.name)
        for tag, move in self._incoming:
            with self._collecting(move):
                self._writers[tag] = CheckedWriter(self._draft(move), move.entry.size_bytes)
        sizes = [move.entry.size_bytes for _, move in self._outgoing + self._incoming]
        for start in range(0, max(sizes, default=0), PIECE_BYTES):
            self._move_piece(start)
        for reader in self._readers.values():
            reader.close()
        for tag, move in self._incoming:
            with self._collecting(move):
                self._finish(tag, move)
        if self._troubles:
            raise self._troubles[0]

    def _move_piece(self, start: int) -> None:
        works, arriving = [], []
        for tag, move in self._incoming:
            if start < move.entry.size_bytes:
                buffer = _piece(move, start)
                arriving.append((tag, move, buffer))
                works.append(dist.irecv(buffer, None, self._group, tag, move.source))
        for tag, move in self._outgoing:
            if start < move.entry.size_bytes:
                buffer = _piece(move, start)
                if tag in self._readers:
                    with self._collecting(move):
                        self._readers[tag].read_into(start, storage_bytes(buffer))
                works.append(dist.isend(buffer, None, self._group, tag, move.target))
        with Told("pieces of copies in memory of other hosts"):
            for work in filter(None, works):
                work.wait()
        for tag, move, buffer in arriving:
            writer = self._writers.pop(tag, None)
            if writer is not None:
                with self._collecting(move):
                    writer.write(storage_bytes(buffer))
                    self._writers[tag] = writer

    def _finish(self, tag: int, move: Move) -> None:
        path, draft, writer = self._folder / move.name, self._draft(move), self._writers.get(tag)
        if writer is not None and writer.finish() == move.entry:
            draft.rename(path)
            return
        draft.unlink(missing_ok=True)
        if writer is not None:
            text = f"{path}: other bytes arrived than rank {move.source} has"
            raise CheckpointError(text)

    def _draft(self, move: Move) -> Path:
        return self._folder / f".coming_{move.name}"

    @contextlib.contextmanager
    def _collecting(self, move: Move) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._troubles.append(error)
        except OSError as error:
            text = f"{self._folder / move.name}: cannot be moved: {error.strerror}"
            self._troubles.append(CheckpointError(text))


def _piece(move: Move, start: int) -> torch.Tensor:
    return torch.empty(min(PIECE_BYTES, move.entry.size_bytes - start), dtype=torch.uint8)
