"""What a rank computes while others do the same beside it: seconds by amount, for each kind of
operator that a plan counts (`plan/operators.py`), and of an optimizer's step.

Each figure is the median of some calls, so a step on this machine takes about that. Memory is as
warm as in a step: one operand was made just now, the other one long ago, and the result is a new
tensor in memory that was last used long ago. What an optimizer reads is cold altogether.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_REPEATS = 7
_ENOUGH_S = 0.4  # of one call: larger ones are read off
_AT_LEAST_S = 0.02  # for one figure
_MOST_REPEATS = 300
_QUEUED = 0.02  # of a call: more is a busy machine
SIDES = (64, 128, 256, 512, 1024, 2048)  # of square matrices
ROWS = (64, 128, 256, 512, 1024)  # of causal attention
_HEADS, _WIDTH = 8, 64
MOVED = tuple(2**power for power in (12, 16, 18, 20, 22, 24, 26, 28))  # bytes
STEPPED = tuple(2**power for power in (12, 16, 20, 22, 24, 26, 28))  # bytes of parameters
_CACHES = 2**26  # bytes, more than caches hold
_MOST_IN_RING = 2048


@dataclass(frozen=True, slots=True)
class Timed:
    """One call; `amount`: operations, or bytes."""

    kind: str
    dtype: str
    amount: float
    seconds: float


def measure_operators(wait: Callable[[], object]) -> tuple[float, list[Timed]]:
    """Seconds of a call that moves nothing, and tables; `wait` for the other ranks."""
    import torch

    found: list[Timed] = []
    for kind, measured in (
        ("product", _products),
        ("attention", _attention),
        ("elementwise", _elementwise),
        ("adamw", _adamw),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            if kind == "adamw" and dtype is torch.bfloat16:
                continue  # parameters are kept in float32
            name = str(dtype).removeprefix("torch.")
            for label, amount, call in measured(dtype):
                wait()
                seconds = median_s(call, evicting() if kind == "adamw" else None)
                found.append(Timed(label, name, amount, seconds))
                if seconds > _ENOUGH_S:
                    break
    return _call_s(), found


def median_s(call: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """Of enough calls; `before` each one, untimed."""

    def once() -> float:
        if before is not None:
            before()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    seconds = min(once(), once())
    repeats = _REPEATS if seconds < _ENOUGH_S / 4 else 3
    return usual_s(once, max(repeats, min(_MOST_REPEATS, int(_AT_LEAST_S / seconds))))


def usual_s(once: Callable[[], float], repeats: int, *, together: bool = False) -> float:
    """The median of so many calls. Where others had the core meanwhile there are some more, and
    those that waited for it most do not count. `together`: ranks take as many, whatever happens.
    """
    found: list[tuple[float, float]] = []
    while len(found) < (2 if together else 3) * repeats:
        before = _queued_s()
        seconds = once()
        found.append(((_queued_s() - before) / seconds, seconds))
        if not together and sum(queued < _QUEUED for queued, _ in found) >= repeats:
            break
    found.sort()
    return statistics.median(seconds for _, seconds in found[:repeats])


def _queued_s() -> float:
    """What this thread has waited for a core; 0 where the kernel does not count."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


def evicting() -> Callable[[], object]:
    """Fills the caches with something else."""
    import torch

    other = torch.zeros(_CACHES, dtype=torch.uint8)
    return lambda: other.add_(1)


Call = tuple[str, float, Callable[[], object]]


def _products(dtype: Any) -> Iterator[Call]:
    import torch

    for side in SIDES:
        means = torch.full((side, side), 1 / side, dtype=dtype)  # products stay as they are
        yield "product", 2.0 * side**3, _Ring(means, torch.matmul)


def _attention(dtype: Any) -> Iterator[Call]:
    import torch
    import torch.nn.functional as F

    for rows in ROWS:
        shape = 1, _HEADS, rows, _WIDTH
        q, k, v = (torch.rand(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        flops = 2.0 * 2 * _HEADS * rows * rows * _WIDTH / 2

        def forward(q: Any = q, k: Any = k, v: Any = v) -> Any:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        grad = torch.ones_like(out)

        def backward(out: Any = out, grad: Any = grad, inputs: Any = (q, k, v)) -> object:
            return torch.autograd.grad(out, inputs, grad, retain_graph=True)

        yield "attention", flops, forward
        yield "attention backward", 2.5 * flops, backward


def _elementwise(dtype: Any) -> Iterator[Call]:
    """Two tensors are read and a new one is written."""
    import torch

    for size in MOVED:
        numel = size // 3 // dtype.itemsize
        call = _Ring(torch.ones(numel, dtype=dtype), torch.mul)
        yield "elementwise", 3.0 * numel * dtype.itemsize, call


def _adamw(dtype: Any) -> Iterator[Call]:
    """As a job steps: fused, parameters of up to 4 MiB."""
    import torch

    for size in STEPPED:
        left, params = size // dtype.itemsize, []
        while left:
            numel = min(left, 2**20)
            params.append(torch.nn.Parameter(torch.zeros(numel, dtype=dtype)))
            params[-1].grad = torch.ones(numel, dtype=dtype)
            left -= numel
        yield "adamw", float(size), torch.optim.AdamW(params, fused=True).step


class _Ring:
    """A call on a tensor and one of so many others that caches do not hold them; its result takes
    the other one's place.
    """

    def __init__(self, tensor: Any, function: Callable[[Any, Any], Any]) -> None:
        self._tensor, self._function, self._next = tensor, function, 0
        number = max(2, min(_MOST_IN_RING, _CACHES // tensor.nbytes))
        self._others = [tensor.clone() for _ in range(number)]

    def __call__(self) -> object:
        at = self._next
        self._next = (at + 1) % len(self._others)
        self._others[at] = self._function(self._tensor, self._others[at])
        return None


def _call_s() -> float:
    import torch

    tensor = torch.ones(64, 64, requires_grad=True)

    def many() -> None:
        for _ in range(100):
            tensor.view(-1)

    return median_s(many) / 100
