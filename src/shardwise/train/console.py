"""What a person sees of a job: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import datetime
import sys
import time
from typing import Any


class Console:
    """Rank 0 shows; the other ranks have a silent one."""

    def __init__(self, *, total_steps: int, line_every: int, silent: bool) -> None:
        self._total, self._every, self._silent = total_steps, line_every, silent
        self._began: tuple[int, float] | None = None  # step and time
        self._progress: Any = None
        self._task: Any = None

    def say(self, text: str) -> None:
        if self._silent:
            return
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def start(self, step: int) -> None:
        self._began = step, time.monotonic()
        if self._silent or not sys.stdout.isatty():
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("", total=self._total, completed=step)
        self._progress.start()

    def step(self, row: dict[str, Any]) -> None:
        step = row["step"]
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=self._fitting(row))
            if "val_loss" in row:
                self.say(self._line(row))
        elif "val_loss" in row or self._has_line(step):
            self.say(self._line(row))

    def _has_line(self, step: int) -> bool:
        """The last one, every n-th, and the first where none would come before the last."""
        if step % self._every == 0 or step == self._total:
            return True
        began = self._began[0] if self._began is not None else 0
        return step == began + 1 and (began // self._every + 1) * self._every >= self._total

    def _fitting(self, row: dict[str, Any]) -> str:
        """What has room beside the bar; loss and speed in any case."""
        beside = len("step  / bar  0:00:00") + 2 * len(str(self._total))
        parts = _parts(row)
        while len(parts) > 2 and len("  ".join(parts)) + beside > self._progress.console.width:
            del parts[-2]
        return "  ".join(parts)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _line(self, row: dict[str, Any]) -> str:
        left = self._left(row["step"])
        return f"step {row['step']:>{len(str(self._total))}}/{self._total}  {_short(row)}{left}"

    def _left(self, step: int) -> str:
        """The time that the rest takes at the speed so far, evaluations and saves included."""
        if self._began is None or step <= self._began[0] or step >= self._total:
            return ""
        spent_s = time.monotonic() - self._began[1]
        left_s = spent_s / (step - self._began[0]) * (self._total - step)
        return f"  eta {datetime.timedelta(seconds=round(left_s))}"


_NOT_OF_THE_MODEL = {
    "step", "loss", "grad_norm", "lr", "epoch", "step_time_s", "peak_memory_bytes", "mfu",
}  # fmt: skip


def _short(row: dict[str, Any]) -> str:
    return "  ".join(_parts(row))


def _parts(row: dict[str, Any]) -> list[str]:
    """The losses, what else the model logs, then norm, rate, memory and speed."""
    others = [k for k in row if k not in _NOT_OF_THE_MODEL and not k.endswith("_per_s")]
    parts = [f"{name} {row[name]:.4f}" for name in ["loss", *others] if name in row]
    if "grad_norm" in row:  # not known where units step in the backward
        parts.append(f"norm {row['grad_norm']:.2f}")
    if "lr" in row:  # not of step 0, which is an evaluation alone
        parts.append(f"lr {row['lr']:.2e}")
    if "peak_memory_bytes" in row:  # of the rank that has most
        parts.append(f"mem {row['peak_memory_bytes'] / 2**30:.2f} GiB")
    if "mfu" in row:
        parts.append(f"mfu {row['mfu']:.1%}")
    parts += [f"{row[k]:,.0f} {k[:-6]}/s" for k in row if k.endswith("_per_s")]
    return parts
