"""Cross-entropy of a linear head without all of its logits: a chunk of rows at a time, exact.

    for each chunk of n rows:   logits [n, V] = hidden [n, D] @ weight.T (+ bias)
                                scores        = operations(logits), in float32
                                loss         += sum of logsumexp(scores) - scores[target]
                                g [n, V]      = gradient of that to the logits, in the same memory
                                d_hidden      = g @ weight
                                d_weight     += g.T @ hidden        one buffer, added into in place

Gradients are made in the forward, while a chunk's logits are there, so each product is computed
once, as in the plain way; the backward multiplies them by the gradient of the loss. So peak memory
is one chunk and the head's gradient, whatever the number of rows. The buffer of a 16-bit weight is
float32, since many chunks add up in it. A frozen head has none.

Source of the idea: Liger kernels (Hsu et al. 2024, arXiv 2410.10989) and Cut Cross-Entropy (Wijmans
et al. 2024, arXiv 2411.09009).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# From logits to scores, element by element: soft caps and scales.
Operation = Callable[[Tensor], Tensor]

_MIN_ROWS = 64  # below, products are no faster for being smaller
_BLOCK = 4096  # rows of a 16-bit weight whose gradient is converted at a time


def rows_of_chunk(dim: int) -> int:
    """As many rows as make logits of a quarter of the head's gradient; it follows from the model
    alone, so that results do."""
    return max(_MIN_ROWS, dim // 4)


@torch.compiler.disable
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    operations: Sequence[Operation] = (),
) -> Tensor:
    """Sum of the cross-entropies of `operations(hidden @ weight.T + bias)`, in float32.

    Args:
        hidden: [N, D]. weight: [V, D]. bias: [V]. targets: int64 [N], each in [0, V).
        operations: what the model does to its logits, element by element.

    The gradients of one call may be asked for once.
    """
    wanted = [hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad]
    if not torch.is_grad_enabled():
        wanted = [False] * 3
    return _Chunked.apply(hidden, weight, bias, targets, tuple(operations), tuple(wanted))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        operations: tuple[Operation, ...],
        wanted: tuple[bool, bool, bool],
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = _buffer_for(weight) if wanted[1] else None
        d_bias = _buffer_for(bias) if bias is not None and wanted[2] else None
        rows = rows_of_chunk(weight.shape[1])
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            loss, g = _loss_of(
                F.linear(hidden[part], weight, bias), targets[part], operations, any(wanted)
            )
            total += loss
            if d_weight is not None:
                _add_product(d_weight, g, hidden[part])
            if d_bias is not None:
                d_bias += g.sum(dim=0)
            if d_hidden is not None:
                torch.mm(g.to(weight.dtype), weight, out=d_hidden[part])
            del g
        ctx.found = [d_hidden, d_weight, d_bias]
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
        return total.float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if ctx.found is None:
            raise RuntimeError(
                "the gradients of a chunked loss were asked for a second time; they are made once, "
                "in the forward. Run the forward again, or set train.chunked_loss = 'off'"
            )
        found, ctx.found = ctx.found, None
        for number, grad in enumerate(found):
            if grad is not None:
                found[number] = grad.mul_(grads[0]).to(ctx.dtypes[number])
        return (*found, None, None, None)


@torch.no_grad()
def _loss_of(
    logits: Tensor, targets: Tensor, operations: tuple[Operation, ...], with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Sum of the losses of some rows, and its gradient to their logits (scratch without it)."""
    scores = leaf = logits
    if operations:
        with torch.set_grad_enabled(with_gradient):
            scores = leaf = logits.requires_grad_(with_gradient)
            for operation in operations:
                scores = operation(scores)
    g = scores.detach().float()  # the logits' own memory where nothing is done to float32 ones
    if operations and g.data_ptr() == scores.data_ptr():
        g = g.clone()  # an operation may have saved it for its gradient
    chosen = g.gather(1, targets.unsqueeze(1))
    largest = g.amax(dim=1, keepdim=True)
    sums = g.sub_(largest).exp_().sum(dim=1, keepdim=True)
    loss = (sums.log() + largest - chosen).double().sum()
    if with_gradient:
        g.div_(sums)[torch.arange(len(g), device=g.device), targets] -= 1.0
        if operations:
            (g,) = torch.autograd.grad(scores, leaf, g.to(scores.dtype))
            g = g.float()
    return loss, g


def _buffer_for(tensor: Tensor) -> Tensor:
    wide = tensor.dtype if tensor.dtype.itemsize >= 4 else torch.float32
    return torch.zeros(tensor.shape, dtype=wide, device=tensor.device)


def _add_product(buffer: Tensor, g: Tensor, hidden: Tensor) -> None:
    """buffer += g.T @ hidden. Processors multiply in float32; accelerators in the dtype of
    `hidden`, some rows of the buffer at a time."""
    if hidden.dtype == buffer.dtype or hidden.device.type == "cpu":
        buffer.addmm_(g.to(buffer.dtype).t(), hidden.to(buffer.dtype))
        return
    narrow = g.to(hidden.dtype)
    for first in range(0, len(buffer), _BLOCK):
        rows = slice(first, first + _BLOCK)
        buffer[rows] += narrow[:, rows].t() @ hidden
