"""Start the ranks of a stage, watch them, and go on behind an item that failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_hour_parts.device import TESTS, Device
from gpu_hour_parts.notes import Notes
from gpu_hour_parts.settings import Row, Settings, Stage

HERE = Path(__file__).resolve().parents[1]
START_LIMIT_S = 180.0  # until the first item begins: imports, drivers, communicators
NO_TIME = "the time of the stage was over"
GRACE_S = 15.0  # for the other ranks, once one has ended badly


@dataclass(slots=True)
class Result:
    """A stage as it ended. `state`: ok, wrong, failed, skipped."""

    stage: Stage
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    why: str = ""

    @property
    def state(self) -> str:
        if self.why:
            return "skipped"
        states = {row["state"] for row in self.rows}
        return next((s for s in ("failed", "wrong", "not run") if s in states), "ok")

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "about": self.stage.about, "state": self.state, "seconds": round(self.seconds, 1),
            "rows": self.rows,
        }  # fmt: skip
        return found | ({"why": self.why} if self.why else {})


def run_stage(stage: Stage, settings: Settings, limit_s: float) -> Result:
    """Never raises for what happens in ranks; takes about `limit_s` at most."""
    result, began = Result(stage), time.monotonic()
    if why := stage.why_skipped(Device(settings.kind)):
        result.why = why
        return result
    deadline = began + limit_s
    notes = Notes(Path(settings.folder), stage.name)
    items = stage.items(settings)
    failed: dict[int, Row] = {}
    first, num_starts = 0, 0
    while first < len(items) and time.monotonic() < deadline:
        num_starts += 1
        with Ranks(stage, settings, first, num_starts) as ranks:
            bad, why = ranks.watch(notes, deadline)
        if not bad and not why:
            break
        number, row = _failure(bad, why, notes, ranks.output())
        if number is None:  # nothing began, and would not the next time
            failed |= dict.fromkeys(range(first, len(items)), row)
            break
        failed[number] = row
        first = number + 1
    done = notes.rows()
    for number, item in enumerate(items):
        row = failed.get(number, done.get(number))
        row = {"state": "not run", "why": NO_TIME} if row is None else row
        result.rows.append({"item": item, "state": "ok", **row})
    result.seconds = time.monotonic() - began
    return result


def _failure(
    bad: list[tuple[int, int]], why: str, notes: Notes, output: str
) -> tuple[int | None, Row]:
    """The item that failed, and its row. One rank's end makes others end, later or further on. No
    item where none had begun.
    """
    begun, errors = notes.begun(), notes.take_errors()
    found: list[tuple[int, int, Row]] = []
    for order, (rank, code) in enumerate(bad):
        if rank in errors:
            error = errors[rank]
            found.append((error.pop("number"), order, {"state": "failed", **error}))
        else:
            said = f"rank {rank} ended with {_named(code)}"
            row = {"state": "failed", "rank": rank, "error": said, "output": output}
            found.append((begun.get(rank, 0), order, row))
    if found:
        number, _, row = min(found, key=lambda f: f[:2])
    else:
        number = min(begun.values(), default=0)
        kind = "why" if why == NO_TIME else "error"
        row = {"state": "not run" if why == NO_TIME else "failed", kind: why, "output": output}
    return number if begun else None, row


class Ranks:
    """The processes of one start; they end with the `with` block."""

    def __init__(self, stage: Stage, settings: Settings, first: int, number: int) -> None:
        self._stage, self._settings = stage, settings
        self._files: list[Path] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        folder = settings.folder
        meeting = f"{folder}/{stage.name}.{number}.meeting"
        command = [sys.executable, "-m", "gpu_hour_parts.rank", folder, stage.name, str(first)]
        world = 1 if stage.is_alone else settings.world
        for rank in range(world):
            path = Path(folder) / f"{stage.name}.{number}.{rank}.log"
            self._files.append(path)
            with open(path, "wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [*command, meeting], stdout=log, stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL, start_new_session=True,
                        env=environment(stage, rank, world),
                    )
                )  # fmt: skip

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def watch(self, notes: Notes, deadline: float) -> tuple[list[tuple[int, int]], str]:
        """Wait until all have ended: ranks that ended badly with their codes, the first to do so
        first; or which time was over.
        """
        started = time.time()
        while not (bad := self._bad()):
            if all(process.poll() == 0 for process in self._processes):
                return [], ""
            begun = notes.begun_at()
            are_all_in = len(begun) == len(self._processes)
            limit = self._stage.item_limit_s if are_all_in else START_LIMIT_S
            if time.time() - (max(begun) if are_all_in else started) > limit:
                return [], f"took more than {limit:.0f} s"
            if time.monotonic() > deadline:
                return [], NO_TIME
            time.sleep(0.05)
        self._wait(GRACE_S)
        return list(dict.fromkeys([*bad, *self._bad()])), ""

    def _bad(self) -> list[tuple[int, int]]:
        codes = [process.poll() for process in self._processes]
        return [(rank, code) for rank, code in enumerate(codes) if code]

    def _wait(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while time.monotonic() < until and any(p.poll() is None for p in self._processes):
            time.sleep(0.05)

    def output(self) -> str:
        """The end of what the ranks have printed."""
        texts = [path.read_text(errors="replace").strip() for path in self._files]
        return "\n".join(f"rank {r}: {text[-1500:]}" for r, text in enumerate(texts) if text)


def environment(stage: Stage, rank: int, world: int) -> dict[str, str]:
    """Of a rank. What torchrun has set for this process is not for those."""
    strange = ("RANK", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "LOCAL_", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    paths = [str(HERE), str(TESTS), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "PYTHONPATH": os.pathsep.join(paths), **stage.environment,
    }  # fmt: skip


def _named(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
