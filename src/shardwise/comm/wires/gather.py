"""Weights in a wire format: each rank encodes its part once, all decode all parts, its own too.

    part -> (encode) -> all-gather -> (decode) -> rank-major buffer in the gather dtype

What is decoded depends on the bytes alone, so all replicas of a weight have the same bits.

Between hosts the parts cross first, once for each rank of a host, then every host spreads what came
in. Rank h L + l of the axis is number l of host h, and a host has L ranks:

    ranks l of all hosts   all-gather of parts                 | (0, l) | (1, l) | ..
    all ranks of a host    all-gather of what these have now   | (0, 0) | (1, 0) | .. | (0, 1) | ..
"""

from __future__ import annotations

import torch

from shardwise.comm.wires.format import decode, encode
from shardwise.comm.wires.steps import Chunks, Mover, Moving, cut, piece_sizes
from shardwise.layout import Format


def gather(
    mover: Mover, form: Format, part: torch.Tensor, packed: torch.Tensor, chunks: Chunks
) -> Moving:
    """Fill `packed` with the parts of all ranks; `part` has as many elements as this rank's chunk
    in it, of the stored or the gather dtype.
    """
    size, itemsize, buffers = mover.size, packed.itemsize, mover.buffers
    if not chunks.is_even:
        yield from _gather_uneven(mover, form, part, packed, chunks)
        return
    cuts = cut(part.numel(), form, packed)
    sizes = piece_sizes(form, itemsize, part.numel(), 0, cuts)
    own, coded = buffers.take(packed, sum(sizes)), buffers.take(packed, size * sum(sizes))
    arriving = coded.split([size * num_bytes for num_bytes in sizes])
    works = []
    for (start, stop), sent, into in zip(cuts, own.split(sizes), arriving, strict=True):
        encode(form, part[start:stop].unsqueeze(0), sent.unsqueeze(0))
        works.append(mover.all_gather(into, sent))
    rows = packed.view(size, -1)
    for (start, stop), into, work in zip(cuts, arriving, works, strict=True):
        yield work
        decode(form, into.view(size, -1), rows[:, start:stop])
    buffers.give_back(own, coded)


def _gather_uneven(
    mover: Mover, form: Format, part: torch.Tensor, packed: torch.Tensor, chunks: Chunks
) -> Moving:
    sizes = [form.num_bytes(chunks.numel(r), packed.itemsize) for r in range(mover.size)]
    own = packed.new_empty(sizes[mover.rank], dtype=torch.uint8)
    encode(form, part.unsqueeze(0), own.unsqueeze(0))
    coded = own.new_empty(sum(sizes))
    sent = own.repeat(mover.size)
    yield mover.all_to_all(coded, sent, sizes, [own.numel()] * mover.size)
    for row, (_, target) in zip(coded.split(sizes), chunks.rows(packed), strict=True):
        decode(form, row.unsqueeze(0), target)


def gather_by_hosts(
    outer: Mover,
    inner: Mover,
    form: Format,
    part: torch.Tensor,
    packed: torch.Tensor,
) -> Moving:
    """The same, between hosts first; all chunks are of one size."""
    numel, hosts, inside = part.numel(), outer.size, inner.size
    num_bytes = form.num_bytes(numel, packed.itemsize) if form.is_lossy else packed.itemsize * numel
    buffers = outer.buffers
    own = buffers.take(packed, num_bytes)
    encode(form, part.unsqueeze(0), own.unsqueeze(0))
    across = buffers.take(packed, hosts * num_bytes)
    yield outer.all_gather(across, own)
    spread = buffers.take(packed, inside * across.numel())
    yield inner.all_gather(spread, across)
    parts = packed.view(hosts, inside, numel).unbind(1)
    for rows, target in zip(spread.view(inside, hosts, num_bytes), parts, strict=True):
        decode(form, rows, target)
    buffers.give_back(own, across, spread)
