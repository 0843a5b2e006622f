"""A rank's parts of all parameters as bytes, and back: float32, or int8 in blocks.

Parts follow each other in the order of the rank's boxes. int8 is that of wire formats
(`layout.wire`): a float32 scale for each block of 128, each element off by at most 1/254 of the
largest of its block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.placement import storage_bytes
from shardwise.comm.wires.format import decode, encode
from shardwise.errors import TransportError
from shardwise.layout.wire import EXACT, Format

FORMS = {"exact": EXACT, "int8": Format("int8")}
_ITEM = 4
Boxes = Sequence[tuple[str, Box]]


def num_bytes(boxes: Boxes, form: str) -> int:
    return sum(_size(box, FORMS[form]) for _, box in boxes)


def pack(values: Sequence[Tensor], form: str) -> list[memoryview]:
    """One tensor for each box; float32 on the host."""
    return [_packed(value, FORMS[form]) for value in values if value.numel()]


def unpack(data: bytearray, boxes: Boxes, form: str) -> Iterator[tuple[str, Box, Tensor]]:
    """Name, box and float32 values of each part."""
    if len(data) != (wanted := num_bytes(boxes, form)):
        raise TransportError(f"{len(data):,} bytes of parameters, expected {wanted:,}")
    at = 0
    for name, box in boxes:
        size = _size(box, FORMS[form])
        if not box.numel:
            yield name, box, torch.empty(box.size)
            continue
        coded = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=at)
        at += size
        if form == "exact":
            yield name, box, coded.view(torch.float32).view(box.size)
            continue
        flat = torch.empty(1, box.numel)
        decode(FORMS[form], coded.clone().unsqueeze(0), flat)
        yield name, box, flat.view(box.size)


def _size(box: Box, form: Format) -> int:
    if not box.numel:
        return 0
    return form.num_bytes(box.numel, _ITEM) if form.is_lossy else box.numel * _ITEM


def _packed(value: Tensor, form: Format) -> memoryview:
    flat = value.detach().to("cpu", torch.float32).contiguous().view(1, -1)
    if not form.is_lossy:
        return storage_bytes(flat)
    coded = torch.zeros(1, form.num_bytes(flat.numel(), _ITEM), dtype=torch.uint8)
    encode(form, flat, coded)
    return storage_bytes(coded)
