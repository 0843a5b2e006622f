"""Evaluation on held-out samples: the same numbers on any number of ranks.

Batches are cut by index, whatever rank runs which, and sums are rounded once. The loss is the mean
over all trained tokens where batches say which these are (`loss/weights.py`), everything else that
a model logs the mean over samples.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from shardwise.train import numerics
from shardwise.train.data import Samples
from shardwise.train.loss.weights import trained_tokens
from shardwise.train.order import Int64Array
from shardwise.train.running import Job, forward
from shardwise.train.tensor_axis import loss_split


def chosen_samples(available: int, wanted: int) -> Int64Array:
    """Evenly spread over the held-out part."""
    count = min(wanted, available)
    return np.linspace(0, available - 1, count).astype(np.int64)


@torch.no_grad()
def evaluate(job: Job, held_out: Samples) -> dict[str, float]:
    """Means over `eval_samples` held-out samples, as `val_<name>`. Collective."""
    chosen = chosen_samples(len(held_out), job.config.train.eval_samples)
    count, micro = len(chosen), job.config.train.micro_batch
    batches = [chosen[start : start + micro] for start in range(0, count, micro)]
    rank, world = job.data_ranks.rank, job.data_ranks.size
    job.model.eval()
    names: list[str] = []
    rows: list[list[float]] = []
    # Every rank runs equally many forwards, which gather parameters together; spare ones weigh
    # nothing.
    for at in range(rank, -(-len(batches) // world) * world, world):
        indices = batches[at] if at < len(batches) else batches[0]
        is_spare = at >= len(batches)
        numerics.begin_evaluation_batch(job.config, job.step, at)
        batch = held_out.batch(indices)
        with loss_split(job.model, job.config):
            outputs = forward(job, batch)
        names = sorted(outputs)
        tokens = trained_tokens(job.model, batch)
        samples = 0 if is_spare else len(indices)
        weights = {name: float(samples) for name in names}
        if tokens is not None:
            weights["loss"] = 0.0 if is_spare else float(tokens)
        sums = [float(outputs[name]) * weights[name] if weights[name] else 0.0 for name in names]
        rows.append([*sums, weights["loss"]])
    flat = [row[column] for column in range(len(names) + 1) for row in rows]
    table = job.data_ranks.rows(job.ranks.gather_floats(flat))
    table = table.reshape(world, len(names) + 1, len(rows))
    *totals, weight = (math.fsum(column.flatten().tolist()) for column in table.unbind(1))
    divisors = dict.fromkeys(names, count) | {"loss": max(1.0, weight)}
    return {f"val_{n}": total / divisors[n] for n, total in zip(names, totals, strict=True)}
