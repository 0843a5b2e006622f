"""What the losses say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean, median

from shardwise.doctor.finding import COSTS, HINT, WRONG, Finding
from shardwise.doctor.run.case import Case

_FEWEST = 12  # steps below which losses are not judged
_FEW = 48
_WORSE = 1.1  # times the best val_loss


def check_loss(case: Case) -> Iterator[Finding]:
    """Rises again, by much more than it scatters."""
    losses = [row["loss"] for row in case.rows if math.isfinite(row.get("loss", math.nan))]
    if len(losses) < _FEWEST:
        return
    width = len(losses) // (8 if len(losses) >= _FEW else 4)
    means = [fmean(losses[i : i + width]) for i in range(0, len(losses) - width + 1, width)]
    best, last, first = min(means), fmean(losses[-width:]), means[0]
    scatter = median(abs(after - before) for before, after in pairwise(losses))
    noise = 4 * scatter / math.sqrt(width)  # of the difference of two means
    if last <= best + max(0.3 * abs(best), 0.5 * (first - best), noise):
        return
    at = case.rows[means.index(best) * width]["step"]
    optim, train = case.config.optim, case.config.train
    norms = [row["grad_norm"] for row in case.rows if "grad_norm" in row]
    clipped = ""
    if train.grad_clip and norms:
        share = sum(norm > train.grad_clip for norm in norms) / len(norms)
        clipped = f"; {share:.0%} of the gradients were longer than train.grad_clip"
    lines = [f"optim.lr = {optim.lr / 10:.2g}   # was {optim.lr:g}"]
    if not train.grad_clip and not optim.in_backward:
        lines.append("train.grad_clip = 1.0   # was 0: no limit")
    yield Finding(
        WRONG,
        "diverges",
        "the loss rises",
        f"metrics.jsonl: loss {best:.4g} at step {at}, {last:.4g} in the last "
        f"{width} steps (means of so many){clipped}",
        "training diverges: the learning rate is too high for this model and batch",
        "\n".join(lines),
    )


def check_evaluation(case: Case) -> Iterator[Finding]:
    """Never run, or worse and worse."""
    values = [(row["step"], row["val_loss"]) for row in case.all_rows if "val_loss" in row]
    every = case.config.train.eval_every
    if not values:
        if case.is_live or not case.end.get("ok", False) or not case.rows:
            return
        why = "train.eval_every is 0" if not every else "the data has no held-out part"
        lines = "train.eval_every = 40" if not every else "data.held_out = 0.02"
        yield Finding(
            HINT,
            "never-evaluated",
            "no evaluation was run",
            f"metrics.jsonl: {case.last_step} steps and no val_loss; {why}",
            "whether the model learns or remembers is not known: loss is that of trained samples",
            lines,
        )
        return
    best_step, best = min(values, key=lambda pair: pair[1])
    last = values[-1][1]
    keeps = case.config.checkpoint.best or case.config.train.patience
    if keeps or len(values) < 3 or last <= _WORSE * best or best_step == values[-1][0]:
        return
    yield Finding(
        COSTS,
        "overfits",
        "held-out samples got worse",
        f"metrics.jsonl: val_loss {best:.4g} at step {best_step}, {last:.4g} at step "
        f"{values[-1][0]}",
        "the model remembers its samples; the last checkpoint is not the best one",
        "checkpoint.best = true\ntrain.patience = 3",
    )
