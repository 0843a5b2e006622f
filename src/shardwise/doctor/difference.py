"""What counts as equal, and how the first difference is told.

exact       every bit of every gradient, of every weight after the step, and of the loss. The
            engine sums micro-batches in one tree (`run.reproducible = "any_world"`), and so
            does the baseline, so that the order of sums is no excuse.
tolerance   for models that any_world refuses, and for one batch in parts or at once, where
            other kernels may run: gradients of the first step within 1e-3 of the largest of
            their parameter (later ones follow weights that AdamW has moved apart: it divides
            by their size, noise included), losses of all steps within 1e-3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

RELATIVE, NOISE = 1e-3, 1e-6


@dataclass(frozen=True, slots=True)
class Numbers:
    """Of one step: the loss, and full gradients and weights (after it) by parameter name."""

    loss: float
    grads: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


def first_difference(found: Numbers, expected: Numbers, step: int, exact: bool) -> str:
    """The first thing in which a step differs from the baseline's; empty if nothing does."""
    where = f"step {step}: "
    if exact:
        kinds = (
            ("gradient", found.grads, expected.grads),
            ("weight", found.weights, expected.weights),
        )
        for kind, ours, theirs in kinds:
            if text := compare(ours, theirs, kind, exact=True):
                return where + text
    elif step == 1 and (text := compare(found.grads, expected.grads, "gradient", exact=False)):
        return where + text
    close = math.isclose(found.loss, expected.loss, rel_tol=0.0 if exact else RELATIVE)
    return "" if close else f"{where}the loss is {found.loss!r} instead of {expected.loss!r}"


def compare(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], kind: str, *, exact: bool
) -> str:
    """The first tensor that differs, with both values where they lie furthest apart."""
    largest = max((float(t.abs().max()) for t in theirs.values() if t.numel()), default=0.0)
    for name in theirs.keys() | ours.keys() if theirs.keys() != ours.keys() else ():
        if (name in ours) != (name in theirs):
            return f"{name}: has a {kind} {'here' if name in ours else 'in the baseline'} only"
    for name, expected in theirs.items():
        found = ours[name]
        if found.shape != expected.shape:
            return f"{kind} of {name}: shape {list(found.shape)}, expected {list(expected.shape)}"
        if exact and torch.equal(found, expected):
            continue
        apart = (found.double() - expected.double()).abs().nan_to_num(nan=math.inf)
        limit = 0.0
        if not exact:
            limit = RELATIVE * float(expected.abs().max() if expected.numel() else 0.0)
            limit += NOISE * largest
        if not exact and not bool((apart > limit).any()):
            continue
        at = int(apart.argmax())
        index = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(at), apart.shape))
        values = f"{float(found.flatten()[at])!r} instead of {float(expected.flatten()[at])!r}"
        num = int((apart > limit).sum())
        return f"{kind} of {name}[{index}] is {values} ({num} of {apart.numel()} elements differ)"
    return ""
