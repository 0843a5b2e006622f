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

On CPU rows are worked on in slices that fit into a cache: what is computed on the way takes no
memory of its own, whose first touch would cost more than all the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.layout.wire import SCALE_BYTES, Format

_LARGEST_CODE = 127
_TINY = 2.0**-126  # the smallest scale: its reciprocal is a float32 too
SLICE = 2**17  # elements

# Of a slice: scales of shape (rows, blocks, 1), what is there instead of elements, and the
# elements, both of shape (rows, blocks, elements). Without scales: (rows, elements).
Slice = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]


def encode(form: Format, rows: torch.Tensor, coded: torch.Tensor) -> None:
    """Write `rows` (rows, elements) into `coded` (rows, bytes), of `form.num_bytes` or more."""
    for scales, codes, values in slices(form, coded, rows):
        _encode(scales, codes, values)


def _encode(scales: torch.Tensor | None, codes: torch.Tensor, values: torch.Tensor) -> None:
    if scales is None:
        codes.copy_(values)
        return
    largest = values.abs().amax(-1, keepdim=True).float()
    scale = (largest / _LARGEST_CODE).clamp_(min=_TINY)
    scale += largest - largest  # nan for inf
    scales.copy_(scale)
    codes.copy_(torch.mul(values, scale.reciprocal_()).round_())


def encode_with_rest(
    form: Format, rows: torch.Tensor, lost: torch.Tensor, coded: torch.Tensor
) -> None:
    """Encode `rows` plus what was `lost` before (float32), and leave there what is lost now; zero
    where that is no number.
    """
    given = zip(slices(form, coded, lost), slices(form, coded, rows), strict=True)
    for (scales, codes, rest), (_, _, values) in given:
        rest += values
        _encode(scales, codes, rest)
        rest -= codes if scales is None else codes * scales
        rest.nan_to_num_(0.0, 0.0, 0.0)


def decode(form: Format, coded: torch.Tensor, out: torch.Tensor) -> None:
    """Write the elements of `coded` into `out` (rows, elements), rounded to its dtype where what
    travelled had more. Of "exact" ones they have that dtype.
    """
    for scales, codes, values in slices(form, coded, out):
        _decode(scales, codes, values)


def _decode(scales: torch.Tensor | None, codes: torch.Tensor, values: torch.Tensor) -> None:
    if scales is None:
        values.copy_(codes)
    elif values.dtype is torch.float32:
        torch.mul(codes, scales, out=values)
    else:
        values.copy_(codes * scales)


def add_up(
    form: Format,
    coded: torch.Tensor,
    out: torch.Tensor,
    scale: float = 1.0,
    exact: torch.dtype = torch.float32,
) -> None:
    """Write `scale` times the sum of all rows, first to last, into `out` (elements), of any dtype:
    added up in float32, or float64 where that is what travelled. `exact`: dtype of what travelled
    as it is.
    """
    whole = out.unsqueeze(0)
    rows = [list(slices(form, row, whole, exact)) for row in coded.unsqueeze(1)]
    for parts in zip(*rows, strict=True):
        target = parts[0][2]
        wide = torch.float64 if exact is torch.float64 else torch.float32
        total = target if target.dtype is wide else torch.empty_like(target, dtype=wide)
        for number, (scales, codes, _) in enumerate(parts):
            if number == 0:
                _decode(scales, codes, total)
            elif scales is None:
                total.add_(codes)
            else:
                total.addcmul_(codes, scales)
        if scale != 1.0:
            total.mul_(scale)
        if total is not target:
            target.copy_(total)


def slices(
    form: Format, coded: torch.Tensor, rows: torch.Tensor, exact: torch.dtype | None = None
) -> Iterator[Slice]:
    """Views of encoded and plain elements, a slice at a time. `exact`: dtype of what travels as it
    is, that of `rows` if nothing is said.
    """
    numel, num_rows = rows.shape[1], rows.shape[0]
    if not numel or not num_rows:
        return
    most = max(SLICE // num_rows, 1) if rows.device.type == "cpu" else numel
    if form.name == "int8":
        yield from _block_slices(form.block, coded, rows, max(most // form.block, 1))
        return
    dtype = torch.bfloat16 if form.name == "bf16" else exact or rows.dtype
    codes = coded[:, : numel * dtype.itemsize].view(dtype)
    for at in range(0, numel, most):
        yield None, codes[:, at : at + most], rows[:, at : at + most]


def _block_slices(
    block: int, coded: torch.Tensor, rows: torch.Tensor, most: int
) -> Iterator[Slice]:
    """At most so many blocks at a time; the one that is left by itself."""
    numel = rows.shape[1]
    whole, num = numel // block, -(-numel // block)
    scales = coded[:, : SCALE_BYTES * num].view(torch.float32).unsqueeze(-1)
    codes = coded[:, SCALE_BYTES * num : SCALE_BYTES * num + numel].view(torch.int8)
    for first in range(0, whole, most):
        last = min(first + most, whole)
        shape, at = (last - first, block), slice(first * block, last * block)
        yield (
            scales[:, first:last],
            codes[:, at].unflatten(1, shape),
            rows[:, at].unflatten(1, shape),
        )
    if whole < num:
        at = slice(whole * block, numel)
        yield scales[:, whole:], codes[:, at].unsqueeze(1), rows[:, at].unsqueeze(1)
