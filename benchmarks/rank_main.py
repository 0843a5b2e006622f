"""A rank process of the benchmark: joins its group, builds its engine, then obeys a pipe.

    ("steps", n)  -> ("steps", seconds of each, processor seconds of each, loss of the last)
    None          -> ends

Between commands it sleeps in `recv`. An exception goes back as ("error", traceback).
"""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from workloads import Precision, Workload


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of a group run."""

    engine: str
    workload: Workload
    precision: Precision
    num_ranks: int
    optimizer: str
    lr: float
    environment: dict[str, str] = field(default_factory=dict)
    rendezvous: str = ""  # path of a file that does not exist yet


def run_rank(rank: int, job: Job, pipe: Connection) -> None:
    try:
        _serve(rank, job, pipe)
    except Exception:
        pipe.send(("error", traceback.format_exc()))


def _serve(rank: int, job: Job, pipe: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from trainers import EngineSpec, make_trainer

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job.rendezvous}", rank=rank, world_size=job.num_ranks
    )
    trainer: Any = make_trainer(
        EngineSpec(job.engine), job.workload.build(), job.precision, job.optimizer, job.lr
    )
    batches = job.workload.batches(rank)
    num_done = 0
    pipe.send(("ready", os.getpid()))
    while (command := pipe.recv()) is not None:
        _, num_steps = command
        dist.barrier()
        elapsed_s, cpu_s = [], []
        loss = torch.zeros(())
        for _ in range(num_steps):
            started_s, cpu_before_s = time.perf_counter(), time.process_time()
            loss = trainer.step(batches[num_done % len(batches)])
            elapsed_s.append(time.perf_counter() - started_s)
            cpu_s.append(time.process_time() - cpu_before_s)
            num_done += 1
        pipe.send(("steps", elapsed_s, cpu_s, loss.item()))
    dist.barrier()
    dist.destroy_process_group()
