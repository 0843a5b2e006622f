"""What wire formats ask of a transport, and the handle of a movement in several steps.

    Mover     moves bytes among the ranks of one group: all-gather, all-to-all
    Buffers   where these bytes lie: memory that is kept warm from one movement to the next
    Steps     runs a generator that issues, and yields what is to be waited for

Each movement here is such a generator: what it does before its first `yield` is done when it is
issued, the rest when somebody waits. All ranks wait for what they issued in the order in which they
issued it, so what later steps issue is in one order too.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.comm.blocks import Blocks
from shardwise.comm.ordered import Ordered
from shardwise.comm.transport import Bucket
from shardwise.errors import DivergenceError, PeerTimeoutError
from shardwise.layout import Format, Packing

SEGMENT = 2**20  # elements
Work = Any  # has wait()
Moving = Generator[Work, None, None]


class Mover(Protocol):
    """Bytes among the ranks of a group; `rank` is this process's place in it."""

    size: int
    rank: int
    buffers: Buffers

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        """`part` of every rank, of one size, end to end."""
        ...

    def all_to_all(
        self, out: torch.Tensor, sent: torch.Tensor, out_sizes: list[int], in_sizes: list[int]
    ) -> Work:
        """Piece r of `sent`, of `in_sizes[r]` bytes, goes to rank r."""
        ...


class Buffers:
    """Bytes for movements. What is not given back (an exception ended the movement) lives as long
    as a collective holds it.
    """

    def __init__(self) -> None:
        self._blocks = Blocks()  # of their own: they are a quarter as large as what others use

    def take(self, like: torch.Tensor, num_bytes: int) -> torch.Tensor:
        storage = torch.UntypedStorage(0, device=like.device)
        self._blocks.fill(storage, num_bytes)
        return like.new_empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))

    def give_back(self, *taken: torch.Tensor) -> None:
        for tensor in taken:
            self._blocks.empty(tensor.untyped_storage())


class Steps:
    """See the module's docstring."""

    def __init__(
        self, transport: Ordered[Any], bucket: Bucket, what: str, moving: Moving, keeps: Any = None
    ) -> None:
        self._transport, self._what, self._keeps = transport, f"{what} of {bucket.name}", keeps
        self._moving: Moving | None = moving
        self._work: Work | None = next(moving, None)

    def wait(self) -> None:
        if self._moving is None:
            return
        transport = self._transport
        while self._work is not None:
            try:
                transport.wait_for(self._work, self._what)
            except (PeerTimeoutError, DivergenceError):
                raise
            except RuntimeError as error:
                raise transport.failure(self._what, error) from error
            self._work = next(self._moving, None)
        self._moving = self._keeps = None


def cut(numel: int, form: Format, like: torch.Tensor) -> list[tuple[int, int]]:
    """Where a piece of so many elements is cut into segments that travel one after the other: on
    CPU, where the next is encoded, and the one before added up, meanwhile. All but the last take
    bytes in multiples of what pieces do, so that cutting adds none.
    """
    step = -(-SEGMENT // (4 * form.block)) * 4 * form.block
    if like.device.type != "cpu" or numel <= step:
        return [(0, numel)]
    return [(at, min(at + step, numel)) for at in range(0, numel, step)]


def piece_sizes(
    form: Format, itemsize: int, numel: int, num_counts: int, cuts: list[tuple[int, int]]
) -> list[int]:
    """Bytes of each segment of a piece, which may end before the last; counts follow its end."""
    sizes = []
    for start, stop in cuts:
        ends = numel <= stop and (numel > start or start == 0)
        size = max(min(numel, stop) - start, 0)
        sizes.append(form.num_bytes(size, itemsize, num_counts if ends else 0))
    return sizes


@dataclass(frozen=True, slots=True)
class Chunks:
    """A flat rank-major buffer: where each rank's chunk starts, and the last one ends."""

    starts: tuple[int, ...]

    @classmethod
    def of(cls, packing: Packing) -> Chunks:
        return cls(packing.starts)

    @property
    def is_even(self) -> bool:
        size = self.starts[1]
        return all(start == r * size for r, start in enumerate(self.starts))

    def numel(self, rank: int) -> int:
        return self.starts[rank + 1] - self.starts[rank]

    def rows(self, buffer: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """The chunks as matrices with a row for each rank, and the first rank of each: one where
        all are of one size.
        """
        if self.is_even:
            return [(0, buffer.view(len(self.starts) - 1, self.starts[1]))]
        return [
            (r, buffer[start : start + self.numel(r)].unsqueeze(0))
            for r, start in enumerate(self.starts[:-1])
        ]
