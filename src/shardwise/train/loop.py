"""The training job on one page: steps, evaluation, metrics, checkpoints, an orderly stop.

A step reads `global_batch` samples at the run's position; rank r takes the r-th contiguous part,
cut into micro-batches. Strategies that keep the gradient partial (`no_shard`, `shard_optimizer`)
reduce it with the last micro-batch only; the others keep it sharded and reduce every time. Once a
step all ranks exchange a few numbers (loss, wish to stop, memory): so all stop, or fail on a loss
that is no number, at the same step.
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import check_finite, clip_grad_norm_, no_sync
from shardwise._torch_compat import compiled_graphs
from shardwise.comm.exchange import sum_over
from shardwise.engine.reproducible.run import ReproducibleRun
from shardwise.errors import NonFiniteError, TrainingError
from shardwise.layout import strategy_named
from shardwise.train import numerics
from shardwise.train.config import resolved_strategy
from shardwise.train.config_file import config_as_dict
from shardwise.train.data import Samples
from shardwise.train.evaluation import evaluate
from shardwise.train.loss.weights import weigh_in_tree, weigh_on_ranks
from shardwise.train.order import Int64Array, SampleOrder
from shardwise.train.profiling import profiled
from shardwise.train.run_dir import RunDir
from shardwise.train.running import Job, forward
from shardwise.train.sampling import sample_texts
from shardwise.train.schedule import learning_rate, set_learning_rate
from shardwise.train.tensor_axis import loss_split
from shardwise.train.watch import NAMES as WATCHED

# Takes one optimizer step: its row for metrics.jsonl, and what asked the job to stop (or nothing).
Step = Callable[[], tuple[dict[str, Any], str]]


def run_steps(job: Job) -> str:
    """Trains until the last step or a request to stop; returns the sentence to end with."""
    with stepping(job) as step:
        return _steps(job, step)


@contextlib.contextmanager
def stepping(job: Job) -> Iterator[Step]:
    """Around all steps of a job; gives the call that takes one."""
    config, order = job.config, SampleOrder(len(job.data.train), job.config.run.seed)
    buffers = _persistent_float_buffers(job.model)
    with numerics.reproducing(config, job.model, job.optimizer) as run:

        def step() -> tuple[dict[str, Any], str]:
            row, stopped = _train_step(job, order, run)
            if run is None:
                _average(buffers, job.ranks.world_size)
            return row, stopped

        yield step


def is_over(job: Job) -> bool:
    """No step is left: all are taken, or evaluations have not become better for too long."""
    return job.step >= job.config.train.steps or job.best.has_lost(job.config.train.patience)


def _steps(job: Job, step: Step) -> str:
    config, first_step = job.config, job.step + 1
    run_dir = RunDir(config)
    if job.step == 0 and config.train.eval_at_start and job.data.held_out is not None:
        _report(job, {"step": 0, **_evaluated(job, job.data.held_out)})
    while not is_over(job):
        with profiled(job.step + 1, config.log.profile_steps, run_dir.profile, job.ranks.rank):
            row, stopped = step() if job.link is None else _over_link(job, step)
        if job.replica is not None:
            row |= job.replica.step()
        last = is_over(job)
        evaluates = _due(config.train.eval_every, job.step, last)
        is_best = False
        if evaluates and job.data.held_out is not None:
            row.update(_evaluated(job, job.data.held_out))
            is_best = job.best.take(job.step, row["val_loss"])
            last = is_over(job)
        _report(job, row)
        if evaluates and job.tokenizer is not None:
            _show_samples(job)
        saves = last or bool(stopped) or _due(config.checkpoint.every, job.step)
        # The first copy shows whether there is room; a step that is on disk needs none.
        copies = job.step == first_step or _due(config.checkpoint.memory_every, job.step)
        if saves:
            save(job)
        elif job.step == first_step and config.checkpoint.rehearsal:
            job.checkpoints.rehearse(job.step, job.model, job.optimizer, extra=_extra(job))
        if is_best and job.best_checkpoints is not None:
            job.best_checkpoints.save(job.step, job.model, job.optimizer, extra=_extra(job))
        if copies and (not saves or config.checkpoint.background):
            copy_to_memory(job)
        if stopped and not last:
            job.checkpoints.close()
            return f"stopped by {stopped} after step {job.step}, saved; start again to continue"
    if job.saved_step < job.step:  # went on from memory and had no step left to take
        save(job)
    job.checkpoints.close()
    if job.best.has_lost(config.train.patience):
        return f"ended early after step {job.step}: {job.best}"
    return f"finished step {job.step}"


def _over_link(job: Job, step: Step) -> tuple[dict[str, Any], str]:
    """A step whose use of the link between hosts is watched."""
    assert job.link is not None
    found, cost = job.link.over(job.model, step)
    if cost is not None:
        if job.record is not None:
            job.record.event("link", **cost)
            job.link.tell(cost)
        job.link = None
    return found


def _evaluated(job: Job, held_out: Samples) -> dict[str, float]:
    with _timed(job, "evaluated"):
        return evaluate(job, held_out)


def _timed(job: Job, name: str) -> contextlib.AbstractContextManager[None]:
    """Its seconds go into log.jsonl."""
    return contextlib.nullcontext() if job.record is None else job.record.timed(name)


def _report(job: Job, row: dict[str, Any]) -> None:
    """A step's row, to all who show or keep it."""
    if job.metrics is not None:
        job.metrics.write(row)
    job.console.step(row)
    job.trackers.numbers(row)


def _show_samples(job: Job) -> None:
    for prompt, text in sample_texts(job, job.tokenizer):
        job.console.say(f"> {prompt}\n  {text}")
        job.trackers.text(job.step, "sample", f"> {prompt}\n\n{text}")


def _due(every: int, step: int, last: bool = False) -> bool:
    return every > 0 and (last or step % every == 0)


def _train_step(
    job: Job, order: SampleOrder, run: ReproducibleRun | None
) -> tuple[dict[str, Any], str]:
    """One optimizer step: the row for metrics.jsonl, and what asked the job to stop (or
    nothing)."""
    config, started = job.config, time.perf_counter()
    job.step += 1
    job.watch.begin()
    lr = learning_rate(config, job.step)
    set_learning_rate(job.optimizer, lr)
    job.model.train()
    job.optimizer.zero_grad()
    means = _forward_backward(job, order) if run is None else _in_tree_order(job, order, run)
    job.position += config.train.global_batch

    names = sorted(means)
    numbers = [means[name] for name in names]
    save_failed = job.checkpoints.check() is not None
    asked = [bool(job.stop.by), peak_memory_bytes(job.device), save_failed]
    table = job.ranks.gather_floats([*asked, *job.watch.numbers(), *numbers])
    asked_of, watched, logged = table.split([len(asked), len(WATCHED), len(names)], dim=1)
    if asked_of[:, 2].any():  # in the background, on all ranks
        job.checkpoints.wait()
    if run is None:
        own = job.data_ranks.rows(logged)
        means = dict(zip(names, own.mean(dim=0).tolist(), strict=True))
    if job.record is not None:
        losses = logged[:, names.index("loss")]
        job.record.ranks(job.step, losses, asked_of[:, 1], watched)
    _check_finite(means["loss"], "loss", job)
    job.loss = means["loss"]
    if not config.optim.in_backward:
        max_norm = config.train.grad_clip or math.inf
        means["grad_norm"] = float(clip_grad_norm_(job.model.parameters(), max_norm))
        _check_finite(means["grad_norm"], "gradient norm", job)
    job.optimizer.step()

    elapsed_s = time.perf_counter() - started
    if config.shard.compile and job.record is not None:
        job.record.compiled(compiled_graphs(), elapsed_s)
    per_step = config.train.global_batch * job.data.units_per_sample
    speed = "samples_per_s" if job.data.unit == "sample" else "tokens_per_s"
    row = {
        "step": job.step,
        **means,
        "lr": lr,
        "epoch": job.position / order.num_samples,
        speed: per_step / elapsed_s,
        "step_time_s": elapsed_s,
        "peak_memory_bytes": int(asked_of[:, 1].max()),
    }
    if job.mfu_per_hz is not None:
        row["mfu"] = job.mfu_per_hz / elapsed_s
    return row, (job.stop.by or "another rank") if asked_of[:, 0].any() else ""


def _forward_backward(job: Job, order: SampleOrder) -> dict[str, float]:
    """All micro-batches of this rank; returns the means of what the model logs."""
    config, own = job.config, list(_micro_batches(job, order))
    strategy = strategy_named(resolved_strategy(config))
    reduce_once = config.optim.in_backward or strategy.defers_reduction
    whole = order.indices(job.position, config.train.global_batch)
    samples = job.watch.over(job.data.train)
    batches, weigh = weigh_on_ranks(job.model, samples, own, whole, job.ranks, job.data_ranks)
    sums: dict[str, Tensor] = {}
    for i, batch in enumerate(batches):
        weight, wait = weigh(batch), reduce_once and i < len(own) - 1
        held_back = no_sync(job.model) if wait else contextlib.nullcontext()
        with held_back, loss_split(job.model, config):
            outputs = forward(job, batch)
            (outputs["loss"] * weight).backward()
        for name, value in outputs.items():
            share = weight if name == "loss" else 1 / len(own)
            sums[name] = sums.get(name, 0) + value.detach().double() * share
    return {name: float(total) for name, total in sums.items()}


def _in_tree_order(job: Job, order: SampleOrder, run: ReproducibleRun) -> dict[str, float]:
    """The same for `any_world`: micro-batches by index, means over those of all ranks."""
    size, samples, ranks = job.config.train.micro_batch, job.watch.over(job.data.train), job.ranks
    starts = range(job.position, job.position + run.num_micro_batches * size, size)
    every = [order.indices(start, size) for start in starts]
    weigh = weigh_in_tree(job.model, samples, every, ranks, run.seed, job.step)
    for micro in run.micro_batches(job.step):
        batch = samples.batch(every[micro.index])
        outputs = forward(job, batch)
        outputs["loss"] = outputs["loss"] * weigh(batch)
        outputs["loss"].backward()
        micro.log(**outputs)
    return run.means()


def _micro_batches(job: Job, order: SampleOrder) -> Iterator[Int64Array]:
    train = job.config.train
    share = train.global_batch // job.data_ranks.size
    first = job.position + job.data_ranks.rank * share
    for start in range(first, first + share, train.micro_batch):
        yield order.indices(start, train.micro_batch)


def save(job: Job) -> None:
    if job.metrics is not None:
        job.metrics.sync()
    with _timed(job, "saved"):
        job.checkpoints.save(job.step, job.model, job.optimizer, extra=_extra(job))
    job.saved_step = job.step


def copy_to_memory(job: Job) -> None:
    if job.copies is None or not job.config.checkpoint.memory_every:
        return
    if job.metrics is not None:
        job.metrics.sync()
    job.copies.save(job.step, job.model, job.optimizer, extra=_extra(job))


def _extra(job: Job) -> dict[str, Any]:
    return {
        "position": job.position,
        "loss": job.loss,
        "data": job.data.fingerprint,
        "seed": job.config.run.seed,
        "numerics": numerics.facts(job.config, job.device, job.ranks.world_size),
        "config": config_as_dict(job.config),
    }


def _check_finite(value: float, what: str, job: Job) -> None:
    if not math.isfinite(value):
        taken = "taken, in the backward" if job.config.optim.in_backward else "not taken"
        text = (
            f"step {job.step}: the {what} is {value}; the step was {taken}. Start again from the "
            "last checkpoint with a lower optim.lr, or look at the data of this step"
        )
        try:
            check_finite(job.model)
        except NonFiniteError as error:
            text += f"\n{error}"
        raise job.ranks.agreed(TrainingError(text))


def peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _persistent_float_buffers(model: nn.Module) -> list[Tensor]:
    """Batch norm's running statistics and the like: what a checkpoint holds besides parameters."""
    saved = model.state_dict().keys()
    named = model.named_buffers()
    return [b for name, b in named if name in saved and b.is_floating_point()]


@torch.no_grad()
def _average(buffers: list[Tensor], world_size: int) -> None:
    """Each rank's batches move its own running statistics; averaged every step, all ranks (and the
    checkpoint, which holds one copy) have those of the whole batch."""
    if not buffers or world_size == 1:
        return
    flat = torch.cat([b.flatten().float() for b in buffers])
    sum_over(flat, [None], "all_reduce of running statistics")
    flat /= world_size
    for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))
