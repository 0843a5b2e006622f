"""A stage of benchmarks/gpu_hour.py whose items end in all ways that there are."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from gpu_hour_parts.settings import Context, Settings, Stage

ITEMS = ["good", "raises on rank 1", "killed", "exits", "hangs on rank 0", "skipped", "last"]


def items(settings: Settings) -> list[str]:
    return ITEMS


def run(item: str, context: Context) -> dict[str, Any]:
    if item == "raises on rank 1" and context.rank == 1:
        raise ZeroDivisionError("one\ntwo")
    if item == "killed" and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "exits" and context.rank == 0:
        print("last words", flush=True)
        os._exit(3)
    if item == "hangs on rank 0" and context.rank == 0:
        time.sleep(600)
    if item == "skipped":
        return {"state": "skipped", "why": "no reason"}
    return {"found": context.world}


STAGE = Stage("broken_stage:STAGE", "ends badly", items, run, ("found",), 1, item_limit_s=6.0)
