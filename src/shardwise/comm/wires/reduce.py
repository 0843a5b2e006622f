"""Gradients in a wire format: each rank encodes what it has for every owner, owners add up.

    gradients -> (encode) -> all-to-all -> float32 sum in the order of ranks -> own part

A piece is | data | a byte for each parameter: had this rank a gradient |. All contributions are
rounded once, the owner's own too, and nothing that is added up is rounded again: the error grows
with no number of ranks, and no rank's share is treated in another way. With feedback the sender
keeps what rounding lost and adds it to its next gradients (Seide et al. 2014; Karimireddy et al.
2019, arXiv 1901.09847), so that sums over steps come out exact.

Between hosts, ranks of a host first add up what they have for the same number of each host, exactly
and in the order of ranks; only these sums travel on. Where all ranks are to have the sum
(`all_reduce`), each adds up its piece, and the sum travels in the same format, to itself as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm.wires.format import add_up, decode, encode, encode_with_rest
from shardwise.comm.wires.steps import Chunks, Mover, Moving, Work, cut, piece_sizes
from shardwise.layout import Format


@dataclass(slots=True, eq=False)
class Feedback:
    """What rounding lost of a bucket's latest gradients, by place; one for a `key`, which says what
    they were about.
    """

    key: object = None
    lost: dict[str, torch.Tensor] = field(default_factory=dict)

    def of(self, key: object) -> Feedback:
        """This one, empty where the last gradients were about something else."""
        if key != self.key:
            self.key, self.lost = key, {}
        return self

    def rest(self, place: str, like: torch.Tensor) -> torch.Tensor:
        """What rows of data lost before, as float32; the encoder leaves there what is lost now."""
        lost = self.lost.get(place)
        if lost is None or lost.shape != like.shape:
            lost = self.lost[place] = torch.zeros(like.shape, device=like.device)
        return lost


@dataclass(frozen=True, slots=True)
class Result:
    """Where this rank's sums go, the data times `scale`; counts as they are."""

    data: torch.Tensor
    counts: torch.Tensor
    scale: float = 1.0

    def add_up(
        self, form: Format, coded: torch.Tensor, exact: torch.dtype, start: int, stop: int
    ) -> None:
        """Of rows of a segment, with flags behind them where the data ends."""
        data, last = self.data[start:stop], self.data.numel()
        if data.numel():
            add_up(form, coded, data, self.scale, exact)
        if last <= stop and (last > start or start == 0):
            flags = coded[:, coded.shape[1] - self.counts.numel() :]
            self.counts.copy_(flags.sum(0, dtype=torch.float32))


def encode_rows(
    form: Format,
    data: torch.Tensor,
    counts: torch.Tensor,
    coded: torch.Tensor,
    rest: torch.Tensor | None,
) -> None:
    """Rows of data, and rows of counts (or one for all), to rows of bytes with flags behind."""
    if rest is None:
        encode(form, data, coded)
    else:
        encode_with_rest(form, data, rest, coded)
    coded[:, coded.shape[1] - counts.shape[1] :].copy_(counts != 0)


class Pieces:
    """What a rank has for all ranks, cut into segments: rows of data with counts behind them."""

    def __init__(
        self, mover: Mover, form: Format, like: torch.Tensor, data: list[int], num: int
    ) -> None:
        """`data`: elements for each rank, `num`: counts behind them."""
        self._mover, self._form = mover, form
        self.cuts = cut(max(data), form, like)
        self._sizes = [piece_sizes(form, like.itemsize, each, num, self.cuts) for each in data]
        own = self._sizes[mover.rank]
        sent = [sum(sizes) for sizes in zip(*self._sizes, strict=True)]
        self.coded = mover.buffers.take(like, sum(sent))
        self.received = mover.buffers.take(like, mover.size * sum(own))
        self._sent = self.coded.split(sent)
        self._arriving = self.received.split([mover.size * size for size in own])

    def send(self, number: int, rows: list[tuple[int, torch.Tensor, torch.Tensor, Any]]) -> Work:
        """Encode a segment of each of `rows` (first rank, data, counts, rest), and send it."""
        start, stop = self.cuts[number]
        sizes = [of_rank[number] for of_rank in self._sizes]
        for first, data, counts, rest in rows:
            if not (size := sizes[first]):
                continue
            at = sum(sizes[:first])
            place = self._sent[number][at : at + data.shape[0] * size].view(data.shape[0], size)
            part, last = data[:, start:stop], data.shape[1]
            ends = last <= stop and (last > start or start == 0)
            rest = None if rest is None else rest[:, start:stop]
            encode_rows(self._form, part, counts if ends else counts[:, :0], place, rest)
        own = [sizes[self._mover.rank]] * self._mover.size
        return self._mover.all_to_all(self._arriving[number], self._sent[number], own, sizes)

    def arrived(self, number: int) -> torch.Tensor:
        """A row from each rank."""
        arriving = self._arriving[number]
        return arriving.view(self._mover.size, arriving.numel() // self._mover.size)

    def give_back(self) -> None:
        self._mover.buffers.give_back(self.coded, self.received)


def reduce(
    mover: Mover,
    form: Format,
    packed: torch.Tensor,
    chunks: Chunks,
    num_counts: int,
    result: Result,
    feedback: Feedback | None = None,
) -> Moving:
    """`packed` has a chunk for each rank: data, and `num_counts` counts."""
    data = [chunks.numel(r) - num_counts for r in range(mover.size)]
    pieces = Pieces(mover, form, packed, data, num_counts)
    rows = []
    for first, values in chunks.rows(packed):
        end = values.shape[1] - num_counts
        rest = None if feedback is None else feedback.rest(f"{first}", values[:, :end])
        rows.append((first, values[:, :end], values[:, end:], rest))
    works = [pieces.send(number, rows) for number in range(len(pieces.cuts))]
    for number, (start, stop) in enumerate(pieces.cuts):
        yield works[number]
        result.add_up(form, pieces.arrived(number), packed.dtype, start, stop)
    pieces.give_back()


def reduce_by_hosts(
    outer: Mover,
    inner: Mover,
    form: Format,
    packed: torch.Tensor,
    chunks: Chunks,
    num_counts: int,
    result: Result,
    feedback: Feedback | None = None,
) -> Moving:
    """The same, inside hosts first; all chunks are of one size."""
    chunk, hosts, inside, buffers = chunks.numel(0), outer.size, inner.size, outer.buffers
    by_number = buffers.take(packed, packed.nbytes)
    arranged = by_number.view(packed.dtype).view(inside, hosts, chunk)
    arranged.copy_(packed.view(hosts, inside, chunk).transpose(0, 1))
    arrived = buffers.take(packed, packed.nbytes)
    sizes = [by_number.numel() // inside] * inside
    yield inner.all_to_all(arrived, by_number, sizes, sizes)
    exact = arrived.view(packed.dtype).view(inside, hosts * chunk)
    summed = exact[0] if packed.itemsize >= 4 else exact[0].float()
    for row in exact[1:]:
        summed.add_(row)
    kept = summed.to(packed.dtype) if not form.is_lossy else summed  # travels as it is
    num_bytes = form.num_bytes(chunk - num_counts, kept.itemsize, num_counts)
    coded = buffers.take(packed, hosts * num_bytes)
    data, rows = chunk - num_counts, kept.view(hosts, chunk)
    rest = None if feedback is None else feedback.rest("hosts", rows[:, :data])
    encode_rows(form, rows[:, :data], rows[:, data:], coded.view(hosts, -1), rest)
    received = buffers.take(packed, hosts * num_bytes)
    yield outer.all_to_all(received, coded, [num_bytes] * hosts, [num_bytes] * hosts)
    result.add_up(form, received.view(hosts, -1), kept.dtype, 0, data)
    buffers.give_back(by_number, arrived, coded, received)


def all_reduce(
    mover: Mover,
    form: Format,
    out: torch.Tensor,
    parts: tuple[int, ...],
    num_counts: int,
    feedback: Feedback | None = None,
) -> Moving:
    """Sum `out` over the ranks, in place: `parts` are the elements of its data that each rank adds
    up, and `num_counts` counts stand at its end.
    """
    size, data, buffers = mover.size, sum(parts), mover.buffers
    counts = out[out.numel() - num_counts :]
    places = out[:data].split(list(parts))
    pieces = Pieces(mover, form, out, list(parts), num_counts)
    rows = []
    for first, values in enumerate(places):
        values = values.unsqueeze(0)
        rest = None if feedback is None else feedback.rest(f"part {first}", values)
        rows.append((first, values, counts.unsqueeze(0), rest))
    works = [pieces.send(number, rows) for number in range(len(pieces.cuts))]
    summed = places[mover.rank]  # which all ranks get back, this one too
    if summed.dtype is not torch.float32:
        summed = torch.empty_like(summed, dtype=torch.float32)
    result = Result(summed, counts)
    rest = None if feedback is None else feedback.rest("sum", summed.unsqueeze(0))
    sizes = piece_sizes(form, out.itemsize, parts[0], 0, pieces.cuts)
    part, gathered = buffers.take(out, sum(sizes)), buffers.take(out, size * sum(sizes))
    spread = gathered.split([size * num_bytes for num_bytes in sizes])
    gathers = []
    for number, ((start, stop), sent) in enumerate(
        zip(pieces.cuts, part.split(sizes), strict=True)
    ):
        yield works[number]
        result.add_up(form, pieces.arrived(number), out.dtype, start, stop)
        kept = None if rest is None else rest[:, start:stop]
        row = summed[start:stop].unsqueeze(0)
        encode_rows(form, row, row[:, :0], sent.unsqueeze(0), kept)
        gathers.append(mover.all_gather(spread[number], sent))
    for (start, stop), into, work in zip(pieces.cuts, spread, gathers, strict=True):
        yield work
        for row, values in zip(into.view(size, -1), places, strict=True):
            decode(form, row.unsqueeze(0), values[start:stop].unsqueeze(0))
    pieces.give_back()
    buffers.give_back(part, gathered)
