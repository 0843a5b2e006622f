"""Elements to bytes and back, a row for each destination.

    bf16    | elements, 2 bytes each |
    int8    | a float32 scale for each block | codes, 1 byte each |
    exact   | elements as they are |

An int8 block is `block` neighbours of a row, the last one what is left. Bounds, which hold for
every element x of a row:

    bf16    |x' - x| <= 2^-8 |x|, plus 2^-134 where x is near zero; above 3.39e38 it is inf
    int8    |x' - x| <= a/254 (1 + 2^-20) with a the largest |x| of its block, or 2^-127

A block with a nan or an inf is nan as a whole: what went wrong stays in sight. Zeros stay zeros. A
row's bytes depend on its elements alone, so all ranks that decode it have the same bits.
"""

from __future__ import annotations

import torch

from shardwise.layout.wire import SCALE_BYTES, Format

_LARGEST_CODE = 127
_TINY = 2.0**-126  # the smallest scale: its reciprocal is a float32 too


def encode(form: Format, rows: torch.Tensor, coded: torch.Tensor) -> None:
    """Write `rows` (rows, elements) into `coded` (rows, bytes), of `form.num_bytes` or more."""
    numel = rows.shape[1]
    if not rows.numel():
        return
    if form.name == "int8":
        for scales, codes, values in _blocks(form.block, coded, rows):
            largest = values.abs().amax(-1).float()
            scale = (largest / _LARGEST_CODE).clamp_(min=_TINY)
            scale += largest - largest  # nan for inf
            scales.copy_(scale)
            codes.copy_(torch.mul(values, scale.reciprocal_().unsqueeze(-1)).round_())
        return
    dtype = torch.bfloat16 if form.name == "bf16" else rows.dtype
    coded[:, : numel * dtype.itemsize].view(dtype).copy_(rows)


def decode(form: Format, coded: torch.Tensor, out: torch.Tensor) -> None:
    """Write the elements of `coded` into `out` (rows, elements), rounded to its dtype where what
    travelled had more. Of "exact" ones they have that dtype.
    """
    numel = out.shape[1]
    if not out.numel():
        return
    if form.name == "int8":
        for scales, codes, values in _blocks(form.block, coded, out):
            if values.dtype is torch.float32:
                torch.mul(codes, scales.unsqueeze(-1), out=values)
            else:
                values.copy_(codes * scales.unsqueeze(-1))
        return
    dtype = torch.bfloat16 if form.name == "bf16" else out.dtype
    out.copy_(coded[:, : numel * dtype.itemsize].view(dtype))


def add_up(
    form: Format, coded: torch.Tensor, numel: int, exact: torch.dtype = torch.float32
) -> torch.Tensor:
    """The sum of all rows in float32, first to last. `exact`: dtype of what travelled as it is; the
    sum has it where that is float64.
    """
    wide = form.name == "exact" and exact is torch.float64
    dtype = torch.float64 if wide else torch.float32
    total = torch.empty(1, numel, dtype=dtype, device=coded.device)
    if not numel:
        return total[0]
    if form.name != "int8":
        dtype = torch.bfloat16 if form.name == "bf16" else exact
        rows = coded[:, : numel * dtype.itemsize].view(dtype)
        total.copy_(rows[:1])
        for row in rows[1:]:
            total.add_(row)
        return total[0]
    decode(form, coded[:1], total)
    for row in coded[1:].unsqueeze(1):
        for scales, codes, sums in _blocks(form.block, row, total):
            sums.addcmul_(codes, scales.unsqueeze(-1))
    return total[0]


def _blocks(
    block: int, coded: torch.Tensor, rows: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Scales, codes and elements of whole blocks, and of the one that is left: views of shapes
    (rows, blocks), (rows, blocks, elements) twice.
    """
    numel = rows.shape[1]
    whole = numel // block
    num = -(-numel // block)
    scales = coded[:, : SCALE_BYTES * num].view(torch.float32)
    codes = coded[:, SCALE_BYTES * num : SCALE_BYTES * num + numel].view(torch.int8)
    found, at = [], whole * block
    if whole:
        shape = (whole, block)
        parts = codes[:, :at].unflatten(1, shape), rows[:, :at].unflatten(1, shape)
        found.append((scales[:, :whole], *parts))
    if at < numel:
        found.append((scales[:, whole:], codes[:, at:].unsqueeze(1), rows[:, at:].unsqueeze(1)))
    return found
