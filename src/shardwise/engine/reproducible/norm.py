"""The global gradient norm in one fixed order of additions, whatever rank holds which rows.

A norm over shards is a sum of sums, and where the shards are cut decides what is added to what.
Here every row (a slice along dim 0) is squared and folded in halves by element-wise additions
alone, whose bits no kernel, thread count or neighbour can change. The rows of all parameters meet
in one vector in which every rank fills in its own, so that the all-reduce adds nothing but zeros;
the vector is folded the same way, in float64.

    row           x0^2 x1^2 x2^2 x3^2 x4^2   ->   +x3^2 +x4^2 ...   ->   one number
    all rows      0 0 r2 r3 0 | 0 r6 0       one vector, summed over the holders, then folded
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardwise.comm.exchange import max_over, sum_over
from shardwise.comm.transport import Axis
from shardwise.engine.core.parameter import ShardedParam

_BLOCK_NUMEL = 1 << 18  # 1 MiB of squares: they stay in the cache until they are folded


@dataclass(frozen=True, slots=True)
class Rows:
    """A gradient as rows, slices along dim 0: `num` of them, this rank's from `first` on. One that
    is cut along another dim is gathered while its rows are folded, so that the additions do not
    depend on the dim that was chosen for a number of ranks.
    """

    gradient: torch.Tensor
    num: int
    first: int
    axes: tuple[Axis, ...]  # whose ranks hold the other rows

    @classmethod
    def of(cls, p: torch.Tensor, param: ShardedParam | None) -> Rows:
        """Of a parameter that has a gradient; `param` is None for plain ones."""
        assert p.grad is not None
        num = p.shape[0] if p.ndim else 1
        if param is None or param.layout.spec.shard_dim:
            return cls(p.grad.detach(), num, 0, ())
        return cls(p.grad.detach(), num, param.rows[0], param.mesh.holders)

    def values(self, norm_type: float) -> torch.Tensor:
        """One number for each row that is at hand."""
        gradient = self.gradient
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local() if self.axes else gradient.full_tensor()
        return _row_values(gradient.abs() if gradient.is_complex() else gradient, norm_type)


def ordered_norm(rows: Sequence[Rows], norm_type: float) -> torch.Tensor:
    """The norm of order 1, 2 or inf over all gradients, in their order: a 0-dim float32 tensor."""
    if norm_type not in (1.0, 2.0, math.inf):
        raise ValueError(
            f"norm_type {norm_type}: in a reproducible run norms of order 1, 2 and inf can be "
            "computed; other powers round differently in vectors and in their tails"
        )
    total, at = sum(r.num for r in rows), 0
    vectors: dict[tuple[Axis, ...], torch.Tensor] = {}
    for r in rows:
        if r.axes not in vectors:
            vectors[r.axes] = torch.zeros(total, dtype=torch.float64, device=r.gradient.device)
        values = r.values(norm_type)
        start = at + r.first
        vectors[r.axes][start : start + values.numel()].copy_(values)
        at += r.num
    return _combine(vectors, norm_type)


def _combine(vectors: dict[tuple[Axis, ...], torch.Tensor], norm_type: float) -> torch.Tensor:
    largest = math.isinf(norm_type)
    for axes, vector in vectors.items():
        over = max_over if largest else sum_over
        over(vector, [axis.group for axis in axes], "all_reduce of the gradient norm")
    device = next(iter(vectors.values())).device
    # At most one of them has a number at each place, so this adds nothing but zeros.
    rows = functools.reduce(torch.add, (v.to(device) for v in vectors.values()))
    if largest:
        return rows.max().float()
    result = fold_rows(rows.view(1, -1))[0]
    return (result.sqrt() if norm_type == 2.0 else result).float()


def fold_rows(x: torch.Tensor) -> torch.Tensor:
    """The sum of each row of a matrix, by halves; overwrites it."""
    n = x.shape[1]
    if n == 0:
        return x.new_zeros(x.shape[0])
    while n > 1:
        half = (n + 1) // 2
        x[:, : n - half].add_(x[:, half:n])
        n = half
    return x[:, 0]


def _row_values(rows: torch.Tensor, norm_type: float) -> torch.Tensor:
    """One number per row: its sum of squares, its sum of sizes, or its largest size."""
    rows = rows if rows.ndim else rows.view(1)
    num = rows.shape[0]
    if rows.numel() == 0:
        return rows.new_zeros(num, dtype=torch.float32)
    rows = rows.reshape(num, -1)
    step = max(1, _BLOCK_NUMEL // rows.shape[1])
    return torch.cat([_block_values(b, norm_type) for b in rows.split(step)])


def _block_values(rows: torch.Tensor, norm_type: float) -> torch.Tensor:
    x = rows if rows.dtype == torch.float64 else rows.float()
    if norm_type == 2.0:
        return fold_rows(x * x)
    if norm_type == 1.0:
        return fold_rows(x.abs())
    return x.abs().amax(dim=1)
