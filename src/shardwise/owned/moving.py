"""Rows of pieces between the ranks of a team: to their owners before a step, and back behind it.

    collect   gradient and parameter, from the ranks of the owner's replica
    spread    the new parameter to all ranks, with the numbers that the optimizer keeps of it

One all-to-all of bytes each, for one piece of every owner. What travels begins at multiples of 16
bytes, so that it can be read as any dtype where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.exchange import run_later
from shardwise.owned.pieces import Piece, Team

ALIGN = 16


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of some shape that travels."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return padded(self.shape.numel() * self.dtype.itemsize)


class Round:
    """An all-to-all that is under way: `wait` gives what came from each rank of the team."""

    def __init__(
        self,
        team: Team,
        sent: Mapping[int, Sequence[Tensor]],
        expected: Mapping[int, Sequence[Part]],
        what: str,
    ) -> None:
        self._team, self._expected = team, expected
        out_sizes = [sum(p.num_bytes for p in expected.get(r, ())) for r in team.order]
        parts = {r: [Part(t.shape, t.dtype) for t in tensors] for r, tensors in sent.items()}
        in_sizes = [sum(p.num_bytes for p in parts.get(r, ())) for r in team.order]
        outgoing = torch.empty(sum(in_sizes), dtype=torch.uint8, device=team.device)
        at = 0
        for rank in team.order:
            for tensor, part in zip(sent.get(rank, ()), parts.get(rank, ()), strict=True):
                _view(outgoing, at, part).copy_(tensor)
                at += part.num_bytes
        self._out = torch.empty(sum(out_sizes), dtype=torch.uint8, device=team.device)
        call = partial(
            dist.all_to_all_single, self._out, outgoing, out_sizes, in_sizes, group=team.group,
            async_op=True,
        )  # fmt: skip
        self._wait = run_later(call, team.group, what, on_host=team.device.type == "cpu")
        self._keeps = outgoing

    def wait(self) -> dict[int, list[Tensor]]:
        """Views of what arrived, by rank of the team."""
        self._wait()
        found: dict[int, list[Tensor]] = {}
        at = 0
        for rank in self._team.order:
            for part in self._expected.get(rank, ()):
                found.setdefault(rank, []).append(_view(self._out, at, part))
                at += part.num_bytes
        return found


def _view(buffer: Tensor, at: int, part: Part) -> Tensor:
    size = part.shape.numel() * part.dtype.itemsize
    return buffer[at : at + size].view(part.dtype).view(part.shape)


def collect(
    team: Team, pieces: Mapping[int, Piece], locals_of: Callable[[Piece], tuple[Tensor, Tensor]]
) -> Round:
    """`pieces`: by owner. `locals_of` a piece: this rank's parts of gradient and parameter."""
    me, place = team.rank, team.place(team.rank)
    sent: dict[int, list[Tensor]] = {}
    for owner, piece in pieces.items():
        if piece.numel(place) and team.sender(place, owner) == me:
            sent[owner] = [piece.of_local(t, place) for t in locals_of(piece)]
    expected: dict[int, list[Part]] = {}
    if (own := pieces.get(me)) is not None:
        dtypes = [t.dtype for t in locals_of(own)]
        for other in range(team.num_places):
            if own.numel(other):
                shape = shape_of(own, other)
                expected[team.sender(other, me)] = [Part(shape, dtype) for dtype in dtypes]
    return Round(team, sent, expected, "gradients of whole tensors")


def assemble(team: Team, piece: Piece, arrived: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    """Gradient and parameter of the owner's piece."""
    some = next(iter(arrived.values()))
    whole = [torch.empty(piece.shape, dtype=t.dtype, device=t.device) for t in some]
    for place in range(team.num_places):
        if piece.numel(place):
            for target, part in zip(whole, arrived[team.sender(place, piece.owner)], strict=True):
                piece.of_whole(target, place).copy_(part)
    return whole


def spread(
    team: Team,
    pieces: Mapping[int, Piece],
    mine: tuple[Tensor, Tensor] | None,
    dtype_of: Callable[[Piece], torch.dtype],
    num_numbers: Callable[[Piece], int],
) -> Round:
    """`mine`: the owner's new parameter and its numbers (float64)."""
    me = team.rank
    sent: dict[int, list[Tensor]] = {}
    if (own := pieces.get(me)) is not None:
        assert mine is not None
        whole, numbers = mine
        for rank in range(team.size):
            place = team.place(rank)
            rows = [own.of_whole(whole, place)] if own.numel(place) else []
            sent[rank] = [numbers, *rows]
    expected: dict[int, list[Part]] = {}
    place = team.place(me)
    for owner, piece in pieces.items():
        rows = [Part(shape_of(piece, place), dtype_of(piece))] if piece.numel(place) else []
        expected[owner] = [Part(torch.Size([num_numbers(piece)]), torch.float64), *rows]
    return Round(team, sent, expected, "whole tensors that were stepped")


def shape_of(piece: Piece, place: int) -> torch.Size:
    """Of the rows that a place has."""
    if piece.cuts is None or piece.dim is None:
        return piece.shape
    shape: list[Any] = list(piece.shape)
    shape[piece.dim] = piece.span(place)[1]
    return torch.Size(shape)
