"""A rank process of `verify`: the trainer's own job, taken step by step and looked at.

    ("baseline",)          plain PyTorch, on one rank          -> rows of the table
    ("compare", v, dir, n) builds the job of variant v (it continues `dir` where that holds a
                           checkpoint) and steps until step n  -> Compared
    ("measure", n)         n more steps, timed; one counted    -> Measured
    ("step",)              one more step (memory is sampled)   -> None
    ("save",)              writes a checkpoint                 -> None

An error goes back as ("error", one line); the process ends then.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.bench.traffic import count_ours
from shardwise.checkpoint.ranks import Ranks
from shardwise.doctor.baseline import load_numbers, run_baseline
from shardwise.doctor.difference import Numbers, first_difference
from shardwise.doctor.plan import Plan, Variant
from shardwise.train.data import Samples
from shardwise.train.job import build_job
from shardwise.train.loop import Step, save, stepping
from shardwise.train.meeting import stay_on_loopback
from shardwise.train.order import Int64Array, SampleOrder
from shardwise.train.run_dir import RunDir
from shardwise.train.running import Job
from shardwise.train.stop import LAUNCHER_VARIABLE, StopRequest
from shardwise.train.worker import die_with_launcher


@dataclass(frozen=True, slots=True)
class Compared:
    """`difference` is empty where nothing differs; `first_step`: after it the job began."""

    difference: str
    first_step: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of a step of this rank; `waiting` is the share in which its main thread did not
    run."""

    step_s: float
    waiting: float
    moved_bytes: int


def serve(rank: int, num_ranks: int, plan: Plan, pipe: Connection, meeting: str) -> None:
    """The target of the process."""
    os.environ[LAUNCHER_VARIABLE] = str(os.getppid())
    die_with_launcher()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    stay_on_loopback()
    torch.set_num_threads(1)
    try:
        with contextlib.ExitStack() as stack:
            looked_at = _Rank(plan, stack)
            while (command := pipe.recv()) is not None:
                if command[0] != "baseline" and not dist.is_initialized():
                    dist.init_process_group(
                        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks
                    )
                pipe.send(("done", getattr(looked_at, command[0])(*command[1:])))
    except Exception as error:  # noqa: BLE001 - it becomes a row of the table
        text = " ".join(str(error).split())
        pipe.send(("error", f"{type(error).__name__}: {text}"))
    os._exit(0)  # peers may hang in whatever differs


class _Recorder:
    """Samples that remember which were read."""

    def __init__(self, samples: Samples) -> None:
        self._samples, self.read = samples, list[int]()

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Int64Array) -> Any:
        self.read += [int(i) for i in indices]
        return self._samples.batch(indices)

    def trained_tokens(self, indices: Int64Array) -> int | None:
        return self._samples.trained_tokens(indices)


class _Rank:
    """The commands."""

    def __init__(self, plan: Plan, stack: contextlib.ExitStack) -> None:
        self.plan, self._stack = plan, stack
        self._job: Job | None = None
        self._step: Step | None = None

    def baseline(self) -> Any:
        return run_baseline(self.plan)

    def compare(self, variant: Variant, run_dir: str, last_step: int) -> Compared:
        self._stack.close()  # the steps of the variant before
        loaded = self.plan.config(variant, run_dir)
        if not self.plan.is_exact:
            torch.use_deterministic_algorithms(True)
        stop, device = StopRequest(), torch.device("cpu")
        job, _ = build_job(loaded, Ranks(), device, stop, RunDir(loaded.config))
        self._job, self._step = job, self._stack.enter_context(stepping(job))
        if job.metrics is not None:
            self._stack.callback(job.metrics.close)
        first_step, difference = job.step, ""
        while job.step < last_step and not difference:
            difference = self._one_step(job, self._step)
        return Compared(difference, first_step)

    def _one_step(self, job: Job, step: Step) -> str:
        """One step and what is wrong with it; the same text on all ranks."""
        grads: dict[str, Tensor] = {}
        recorder = _Recorder(job.data.train)
        position = job.position
        before = job.data
        job.data = replace(before, train=recorder)
        hook = job.optimizer.register_step_pre_hook(lambda *_: grads.update(_grads(job.model)))
        try:
            row, _ = step()
        finally:
            hook.remove()
            job.data = before
        weights = {n: _whole(p) for n, p in job.model.named_parameters()}
        found = Numbers(row["loss"], grads, weights)
        everyone = job.ranks.on_all(lambda: recorder.read)

        def judge() -> str:
            if text := _coverage(job, position, everyone):
                return text
            expected = load_numbers(self.plan.folder, job.step)
            return first_difference(found, expected, job.step, self.plan.is_exact)

        return job.ranks.on_rank0(judge)

    def measure(self, num_steps: int) -> Measured:
        job, step = self._running()
        elapsed, waiting = [], []
        for _ in range(num_steps):
            began = time.perf_counter(), time.thread_time()
            step()
            elapsed.append(time.perf_counter() - began[0])
            waiting.append(elapsed[-1] - (time.thread_time() - began[1]))
        middle = sorted(range(num_steps), key=elapsed.__getitem__)[num_steps // 2]
        moved = count_ours(job.model, step).total_bytes
        return Measured(elapsed[middle], max(0.0, waiting[middle]) / elapsed[middle], moved)

    def step(self) -> None:
        self._running()[1]()

    def save(self) -> None:
        save(self._running()[0])

    def _running(self) -> tuple[Job, Step]:
        assert self._job is not None and self._step is not None, "a compare comes first"
        return self._job, self._step


def _grads(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, param in model.named_parameters():
        if param.grad is not None:
            yield name, _whole(param.grad)


@torch.no_grad()
def _whole(tensor: Tensor) -> Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def _coverage(job: Job, position: int, read: list[list[int]]) -> str:
    """Every sample of the global batch must be read once, by one rank."""
    order = SampleOrder(len(job.data.train), job.config.run.seed)
    wanted = Counter(int(i) for i in order.indices(position, job.config.train.global_batch))
    found = Counter(i for indices in read for i in indices)
    for sample in sorted((wanted | found).keys()):
        if wanted[sample] != found[sample]:
            ranks = [rank for rank, indices in enumerate(read) if sample in indices]
            return (
                f"step {job.step}: sample {sample} was read {found[sample]} times (ranks {ranks}) "
                f"instead of {wanted[sample]}"
            )
    return ""
