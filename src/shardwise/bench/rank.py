"""A rank process of the benchmark: joins its group, builds its engine, then obeys a pipe.

    ("steps", n)  -> ("steps", of each seconds, processor s, waiting s; the last loss)
    ("traffic",)  -> ("traffic", what one more step communicates)
    None          -> ends

Between commands it sleeps in `recv`. An exception goes back as ("error", first line, traceback), a
user's mistake as ("mistake", line). It ends with the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from shardwise.bench.engines import EngineSpec
from shardwise.bench.workload import SEED, Precision, Workload
from shardwise.errors import ConfigError
from shardwise.train.meeting import stay_on_loopback

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of a group run."""

    spec: EngineSpec
    workload: Workload
    precision: Precision
    num_ranks: int
    num_micro_batches: int = 1
    optimizer: str = "fused"
    lr: float = 3e-4
    num_threads: int = 1
    cgroup: str = ""  # a memory cgroup to move into first; empty: stay
    rendezvous: str = ""  # path of a file that does not exist yet


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known once a model is built."""

    num_params: int
    items_per_step: int  # of one rank


def run_rank(rank: int, job: Job, parent: int, pipe: Connection) -> None:
    """The target of the process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        return
    try:
        _serve(rank, job, pipe)
    except ConfigError as error:
        _tell(pipe, ("mistake", str(error)))
    except Exception as error:  # noqa: BLE001 - it becomes a row of the table
        first = next(iter(str(error).splitlines()), "")
        _tell(pipe, ("error", f"{type(error).__name__}: {first}", traceback.format_exc()))


def _tell(pipe: Connection, answer: tuple[str, ...]) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        pipe.send(answer)


def _next_command(pipe: Connection) -> tuple[Any, ...] | None:
    try:
        return pipe.recv()
    except EOFError:  # as above: a time limit, or an interruption
        sys.exit()


def _serve(rank: int, job: Job, pipe: Connection) -> None:
    if job.cgroup:
        with open(os.path.join(job.cgroup, "cgroup.procs"), "w") as file:
            file.write(str(os.getpid()))
    stay_on_loopback()
    os.environ |= dict(job.spec.environment)  # asked for by name
    # Some engines read these although the process group is there.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.num_ranks)}
    os.environ["LOCAL_WORLD_SIZE"] = str(job.num_ranks)
    if job.spec.is_foreign:  # their progress and deprecations are not what was asked for
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
    import torch
    import torch.distributed as dist

    from shardwise.bench.trainers import Setup, make_trainer

    torch.set_num_threads(job.num_threads)
    dist.init_process_group(
        "gloo", init_method=f"file://{job.rendezvous}", rank=rank, world_size=job.num_ranks
    )
    model = job.workload.build()
    batches = [b.for_model(model) for b in job.workload.batches(rank, job.num_ranks)]
    micro = job.num_micro_batches
    num_items = sum(job.workload.num_items(batches[i % len(batches)]) for i in range(micro))
    facts = Facts(sum(p.numel() for p in model.parameters()), num_items)
    setup = Setup(job.spec, model, job.precision, micro, job.workload.unit, job.optimizer, job.lr)
    trainer = make_trainer(setup)
    torch.manual_seed(SEED + 1 + rank)  # dropout draws the same, whatever sharding drew
    num_done = 0
    pipe.send(("ready", facts))

    def step() -> torch.Tensor:
        nonlocal num_done
        first = num_done * micro
        num_done += 1
        return trainer.step([batches[(first + i) % len(batches)] for i in range(micro)])

    while (command := _next_command(pipe)) is not None:
        dist.barrier()
        if command[0] == "traffic":
            pipe.send(("traffic", trainer.traffic(step).as_json()))
        else:
            pipe.send(("steps", *_timed(step, command[1])))
    dist.barrier()
    dist.destroy_process_group()


def _timed(step: Any, num_steps: int) -> tuple[list[float], list[float], list[float], float]:
    elapsed_s, cpu_s, waiting_s = [], [], []
    loss: Any = None
    for _ in range(num_steps):
        before = time.perf_counter(), time.process_time(), time.thread_time()
        loss = step()
        elapsed = time.perf_counter() - before[0]
        elapsed_s.append(elapsed)
        cpu_s.append(time.process_time() - before[1])
        waiting_s.append(elapsed - (time.thread_time() - before[2]))
    return elapsed_s, cpu_s, waiting_s, float(loss)
