"""One rank of a stage: `python -m gpu_hour_parts.rank FOLDER STAGE FIRST_ITEM MEETING`, with RANK
and WORLD_SIZE in the environment."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import warnings
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Whatever ends the launcher ends its ranks."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(folder: str, name: str, first: int, meeting: str) -> None:
    import torch
    import torch.distributed as dist

    from gpu_hour_parts.device import Device
    from gpu_hour_parts.notes import Notes
    from gpu_hour_parts.settings import Context, Settings
    from gpu_hour_parts.stages import stage_named

    die_with_parent()
    settings, stage = Settings.read(folder), stage_named(name)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = Device(settings.kind, rank if settings.kind == "cuda" else 0)
    notes, number = Notes(Path(folder), name), first
    try:
        warnings.simplefilter("ignore")
        if not device.is_cuda:
            torch.set_num_threads(1)
        device.load()
        if not stage.is_alone:
            device.join(rank, world, meeting)
        context = Context(settings, device, rank, world)
        items = stage.items(settings)
        for number in range(first, len(items)):
            notes.begin(rank, number)
            if not stage.is_alone:
                dist.barrier()
            row = stage.run(items[number], context)
            if races := device.take_races():
                raise RuntimeError(f"{len(races)} race(s), the first: {races[0]}")
            if rank == 0:
                notes.end(number, row)
            gc.collect()
        if not stage.is_alone:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        notes.fail(rank, number, error)
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # a communicator that is torn down now may wait for ranks for ever


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
