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

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shardwise.comm.wires.format import add_up, decode, encode
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
        """Encode `rows` with what was lost before, and keep what is lost now."""
        lost = self.lost.get(place)
        if lost is None or lost.shape != rows.shape:
            lost = self.lost[place] = torch.zeros_like(rows, dtype=torch.float32)
        lost += rows
        encode(form, lost, coded)
        decoded = torch.empty_like(lost)
        decode(form, coded, decoded)
        lost -= decoded
        lost.nan_to_num_(0.0, 0.0, 0.0)  # a step with a nan is lost as a whole


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


def sum_rows(
    form: Format, coded: torch.Tensor, data: int, num_counts: int, exact: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the data and of the counts of all rows."""
    counts = coded[:, coded.shape[1] - num_counts :].sum(0, dtype=torch.float32)
    return add_up(form, coded, data, exact), counts


def reduce(
    mover: Mover,
    form: Format,
    packed: torch.Tensor,
    chunks: Chunks,
    num_counts: int,
    deliver: Callable[[torch.Tensor, torch.Tensor], None],
    feedback: Feedback | None = None,
) -> Moving:
    """`packed` has a chunk for each rank: data, and `num_counts` counts. `deliver` is called with
    this rank's sums of both, in float32.
    """
    ranks = range(mover.size)
    sizes = [
        form.num_bytes(chunks.numel(r) - num_counts, packed.itemsize, num_counts) for r in ranks
    ]
    coded = packed.new_empty(sum(sizes), dtype=torch.uint8)
    rows = coded.view(mover.size, -1).unsqueeze(0) if chunks.is_even else coded.split(sizes)
    for (first, values), target in zip(chunks.rows(packed), rows, strict=True):
        target = target if target.ndim == 2 else target.unsqueeze(0)
        data = values.shape[1] - num_counts
        encode_rows(form, values[:, :data], values[:, data:], target, feedback, f"{first}")
    own = sizes[mover.rank]
    received = coded.new_empty(mover.size * own)
    yield mover.all_to_all(received, coded, [own] * mover.size, sizes)
    data = chunks.numel(mover.rank) - num_counts
    deliver(*sum_rows(form, received.view(mover.size, own), data, num_counts, packed.dtype))


def reduce_by_hosts(
    outer: Mover,
    inner: Mover,
    form: Format,
    packed: torch.Tensor,
    chunks: Chunks,
    num_counts: int,
    deliver: Callable[[torch.Tensor, torch.Tensor], None],
    feedback: Feedback | None = None,
) -> Moving:
    """The same, inside hosts first; all chunks are of one size."""
    chunk, hosts, inside = chunks.numel(0), outer.size, inner.size
    by_number = packed.view(hosts, inside, chunk).transpose(0, 1).reshape(-1).view(torch.uint8)
    arrived = torch.empty_like(by_number)
    sizes = [by_number.numel() // inside] * inside
    yield inner.all_to_all(arrived, by_number, sizes, sizes)
    exact = arrived.view(packed.dtype).view(inside, hosts * chunk)
    summed = exact[0] if packed.itemsize >= 4 else exact[0].float()
    for row in exact[1:]:
        summed.add_(row)
    kept = summed.to(packed.dtype) if not form.is_lossy else summed  # travels as it is
    num_bytes = form.num_bytes(chunk - num_counts, kept.itemsize, num_counts)
    coded = packed.new_empty(hosts * num_bytes, dtype=torch.uint8)
    data, rows = chunk - num_counts, kept.view(hosts, chunk)
    given = rows[:, :data], rows[:, data:], coded.view(hosts, -1)
    encode_rows(form, *given, feedback, "hosts")
    received = torch.empty_like(coded)
    yield outer.all_to_all(received, coded, [num_bytes] * hosts, [num_bytes] * hosts)
    deliver(*sum_rows(form, received.view(hosts, -1), data, num_counts, kept.dtype))


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
    size, data = mover.size, sum(parts)
    counts = out[out.numel() - num_counts :]
    sizes = [form.num_bytes(numel, out.itemsize, num_counts) for numel in parts]
    coded = out.new_empty(sum(sizes), dtype=torch.uint8)
    for r, (values, target) in enumerate(
        zip(out[:data].split(list(parts)), coded.split(sizes), strict=True)
    ):
        given = values.unsqueeze(0), counts.unsqueeze(0), target.unsqueeze(0)
        encode_rows(form, *given, feedback, f"part {r}")
    own, numel = sizes[mover.rank], parts[mover.rank]
    received = coded.new_empty(size * own)
    yield mover.all_to_all(received, coded, [own] * size, sizes)
    summed, total = sum_rows(form, received.view(size, own), numel, num_counts, out.dtype)
    largest = form.num_bytes(parts[0], out.itemsize)
    part = coded.new_zeros(largest)
    if feedback is None or not numel:
        encode(form, summed.unsqueeze(0), part.unsqueeze(0))
    else:
        feedback.encode("sum", form, summed.unsqueeze(0), part.unsqueeze(0))
    gathered = coded.new_empty(size * largest)
    yield mover.all_gather(gathered, part)
    for row, values in zip(gathered.view(size, -1), out[:data].split(list(parts)), strict=True):
        decode(form, row.unsqueeze(0), values.unsqueeze(0))
    counts.copy_(total)
