"""Ranks on this host that measure side by side, each with the threads that a job would give it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.doctor.machine.collectives import Collective, measure_collectives
from shardwise.doctor.machine.compute import Timed, measure_operators
from shardwise.errors import ConfigError

_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Compute:
    """What each of `ranks` ranks reaches beside the others; `call_s`: of an operator that moves
    nothing."""

    ranks: int
    threads: int
    call_s: float
    operators: tuple[Timed, ...]


def measure_ranks(ranks: int) -> tuple[Compute, tuple[Collective, ...]]:
    """Takes about a minute. ConfigError where ranks cannot talk to each other."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as folder:
        meeting = str(Path(folder) / "meeting")
        args = [(rank, ranks, meeting, theirs) for rank in range(ranks)]
        processes = [context.Process(target=_rank, args=each, daemon=True) for each in args]
        for process in processes:
            process.start()
        theirs.close()
        try:
            found = ours.recv() if ours.poll(_TIMEOUT_S) else None
        except EOFError:
            found = None
        for process in processes:
            process.join(5.0 if found else 0.1)
            process.kill()
    if not isinstance(found, tuple):
        said = found or "no word"
        raise ConfigError(f"{ranks} ranks cannot talk to each other on this host: {said}")
    return found


def threads_of(ranks: int) -> int:
    """As the launcher has it."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return int(said) if said.isdecimal() and int(said) else max(1, (cores or 1) // ranks)


def _rank(rank: int, ranks: int, meeting: str, pipe: Any) -> None:
    """The target of a process."""
    import torch
    import torch.distributed as dist

    from shardwise.train.meeting import stay_on_loopback

    try:
        stay_on_loopback()
        torch.set_num_threads(threads_of(ranks))
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks
        )
        call_s, operators = _mean(measure_operators(dist.barrier), ranks)
        collectives = measure_collectives(ranks)
        if rank == 0:
            compute = Compute(ranks, torch.get_num_threads(), call_s, operators)
            pipe.send((compute, tuple(collectives)))
        dist.barrier()
    except Exception as error:  # noqa: BLE001 - told by the parent
        if rank == 0:
            pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _mean(own: tuple[float, list[Timed]], ranks: int) -> tuple[float, tuple[Timed, ...]]:
    """Over ranks; where one stopped earlier, so far."""
    import torch.distributed as dist

    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, own)
    call_s = sum(each[0] for each in every) / ranks
    tables = [{(t.kind, t.dtype, t.amount): t.seconds for t in each[1]} for each in every]
    known = [key for key in tables[0] if all(key in table for table in tables)]
    return call_s, tuple(Timed(*key, sum(table[key] for table in tables) / ranks) for key in known)
