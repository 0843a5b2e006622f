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

import torch

from shardwise.comm.wires.format import add_up, decode, encode, encode_with_rest
from shardwise.comm.wires.steps import Chunks, Mover, Moving
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

    def encode(self, place: str, form: Format, rows: torch.Tensor, coded: torch.Tensor) -> None:
        """Encode `rows` with what was lost before, and keep what is lost now. Of a step with a nan
        nothing is kept.
        """
        lost = self.lost.get(place)
        if lost is None or lost.shape != rows.shape:
            lost = self.lost[place] = torch.zeros(rows.shape, device=rows.device)
        encode_with_rest(form, rows, lost, coded)


@dataclass(frozen=True, slots=True)
class Result:
    """Where this rank's sums go, the data times `scale`; counts as they are."""

    data: torch.Tensor
    counts: torch.Tensor
    scale: float = 1.0

    def add_up(self, form: Format, coded: torch.Tensor, exact: torch.dtype) -> None:
        """Of rows of data with flags behind them."""
        add_up(form, coded, self.data, self.scale, exact)
        flags = coded[:, coded.shape[1] - self.counts.numel() :]
        self.counts.copy_(flags.sum(0, dtype=torch.float32))


def encode_rows(
    form: Format,
    data: torch.Tensor,
    counts: torch.Tensor,
    coded: torch.Tensor,
    feedback: Feedback | None,
    place: str,
) -> None:
    """Rows of data, and rows of counts (or one for all), to rows of bytes with flags behind."""
    if feedback is None:
        encode(form, data, coded)
    elif data.numel():
        feedback.encode(place, form, data, coded)
    coded[:, coded.shape[1] - counts.shape[1] :].copy_(counts != 0)


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
    ranks, buffers = range(mover.size), mover.buffers
    sizes = [
        form.num_bytes(chunks.numel(r) - num_counts, packed.itemsize, num_counts) for r in ranks
    ]
    coded = buffers.take(packed, sum(sizes))
    rows = coded.view(mover.size, -1).unsqueeze(0) if chunks.is_even else coded.split(sizes)
    for (first, values), target in zip(chunks.rows(packed), rows, strict=True):
        target = target if target.ndim == 2 else target.unsqueeze(0)
        data = values.shape[1] - num_counts
        encode_rows(form, values[:, :data], values[:, data:], target, feedback, f"{first}")
    own = sizes[mover.rank]
    received = buffers.take(packed, mover.size * own)
    yield mover.all_to_all(received, coded, [own] * mover.size, sizes)
    result.add_up(form, received.view(mover.size, own), packed.dtype)
    buffers.give_back(coded, received)


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
    given = rows[:, :data], rows[:, data:], coded.view(hosts, -1)
    encode_rows(form, *given, feedback, "hosts")
    received = buffers.take(packed, hosts * num_bytes)
    yield outer.all_to_all(received, coded, [num_bytes] * hosts, [num_bytes] * hosts)
    result.add_up(form, received.view(hosts, -1), kept.dtype)
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
    sizes = [form.num_bytes(numel, out.itemsize, num_counts) for numel in parts]
    coded = buffers.take(out, sum(sizes))
    places = out[:data].split(list(parts))
    for r, (values, target) in enumerate(zip(places, coded.split(sizes), strict=True)):
        given = values.unsqueeze(0), counts.unsqueeze(0), target.unsqueeze(0)
        encode_rows(form, *given, feedback, f"part {r}")
    own = sizes[mover.rank]
    received = buffers.take(out, size * own)
    yield mover.all_to_all(received, coded, [own] * size, sizes)
    summed = places[mover.rank]  # which all ranks get back, this one too
    if summed.dtype is not torch.float32:
        summed = torch.empty_like(summed, dtype=torch.float32)
    Result(summed, counts).add_up(form, received.view(size, own), out.dtype)
    buffers.give_back(coded, received)
    largest = form.num_bytes(parts[0], out.itemsize)
    part = buffers.take(out, largest)
    given = summed.unsqueeze(0), counts[:0].unsqueeze(0), part.unsqueeze(0)
    encode_rows(form, *given, feedback, "sum")
    gathered = buffers.take(out, size * largest)
    yield mover.all_gather(gathered, part)
    for row, values in zip(gathered.view(size, -1), places, strict=True):
        decode(form, row.unsqueeze(0), values.unsqueeze(0))
    buffers.give_back(part, gathered)
