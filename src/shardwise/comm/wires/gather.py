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
from shardwise.comm.wires.steps import Chunks, Mover, Moving
from shardwise.layout import Format


def gather(
    mover: Mover, form: Format, part: torch.Tensor, packed: torch.Tensor, chunks: Chunks
) -> Moving:
    """Fill `packed` with the parts of all ranks; `part` has as many elements as this rank's chunk
    in it, of the stored or the gather dtype.
    """
    size, itemsize = mover.size, packed.itemsize
    sizes = [form.num_bytes(chunks.numel(r), itemsize) for r in range(size)]
    own = packed.new_empty(sizes[mover.rank], dtype=torch.uint8)
    encode(form, part.unsqueeze(0), own.unsqueeze(0))
    coded = own.new_empty(sum(sizes))
    if chunks.is_even:
        yield mover.all_gather(coded, own)
    else:
        yield mover.all_to_all(coded, own.repeat(size), sizes, [own.numel()] * size)
    decode_all(form, coded, packed, chunks, sizes)


def gather_by_hosts(
    outer: Mover,
    inner: Mover,
    form: Format,
    part: torch.Tensor,
    packed: torch.Tensor,
    chunks: Chunks,
) -> Moving:
    """The same, between hosts first; all chunks are of one size."""
    numel, hosts, inside = part.numel(), outer.size, inner.size
    num_bytes = form.num_bytes(numel, packed.itemsize) if form.is_lossy else packed.itemsize * numel
    own = packed.new_empty(num_bytes, dtype=torch.uint8)
    encode(form, part.unsqueeze(0), own.unsqueeze(0))
    across = own.new_empty(hosts * num_bytes)
    yield outer.all_gather(across, own)
    spread = own.new_empty(inside * across.numel())
    yield inner.all_gather(spread, across)
    by_rank = spread.view(inside, hosts, num_bytes).transpose(0, 1)
    decode_all(form, by_rank.reshape(-1), packed, chunks, [num_bytes] * (hosts * inside))


def decode_all(
    form: Format, coded: torch.Tensor, packed: torch.Tensor, chunks: Chunks, sizes: list[int]
) -> None:
    """Rows of bytes, of `sizes`, to chunks of elements."""
    if chunks.is_even:
        decode(form, coded.view(len(sizes), -1), packed.view(len(sizes), -1))
        return
    for row, (_, target) in zip(coded.split(sizes), chunks.rows(packed), strict=True):
        decode(form, row.unsqueeze(0), target)
