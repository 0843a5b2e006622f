"""Where the numbers of a run go beside metrics.jsonl: one small protocol, one file for each place.

    tensorboard, figure         files in the run directory; `auto` has those that are installed
    wandb, mlflow, trackio      services; each is set up by its own environment variables

Rank 0 has them. A tracker that fails is told once and left out: the training goes on. A tracker of
another kind is one file with a class that has the methods of `Tracker`, and a row in `_PLACES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from shardwise.train.options import nearest


@dataclass(frozen=True, slots=True)
class Run:
    """What a tracker may know of the run that it follows; `step` is where this start goes on."""

    directory: Path
    step: int
    config: dict[str, dict[str, Any]]

    @property
    def name(self) -> str:
        return self.directory.resolve().name


class Tracker(Protocol):
    """Takes what a run tells. May raise whatever it likes."""

    def numbers(self, step: int, row: dict[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


# Name -> the package that it needs, and what to install for it. Each has a module of its name here,
# with a class Place.
_PLACES = {
    "tensorboard": ("tensorboard", 'pip install "shardwise[tensorboard]"'),
    "figure": ("matplotlib", 'pip install "shardwise[figures]"'),
    "wandb": ("wandb", 'pip install "shardwise[wandb]"'),
    "mlflow": ("mlflow", "pip install mlflow"),
    "trackio": ("trackio", "pip install trackio"),
}
_AUTO = ("tensorboard", "figure")


def tracker_problem(names: Sequence[str]) -> str:
    """What is wrong with `log.trackers`; empty if nothing is. Imports nothing."""
    for name in names:
        if name in ("auto", "none"):
            if len(names) > 1:
                return f"{name} stands alone; leave out the others, or name those that you want"
        elif name not in _PLACES:
            hint = nearest(name, _PLACES) or f"there are auto, none, {', '.join(_PLACES)}"
            return f"{name!r} is no tracker; {hint}"
        elif not _is_installed(name):
            package, how = _PLACES[name]
            return f"{name} needs the package {package}, which is not installed: {how}"
    return ""


def _is_installed(name: str) -> bool:
    return find_spec(_PLACES[name][0]) is not None


def chosen(names: Sequence[str]) -> list[str]:
    """The places that `log.trackers` stands for."""
    if tuple(names) == ("auto",):
        return [name for name in _AUTO if _is_installed(name)]
    return [] if tuple(names) == ("none",) else list(names)


class Trackers:
    """All trackers of a run, as one that never raises."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._open: dict[str, Tracker] = {}

    def open(self, names: Sequence[str], run: Run) -> None:
        """Once the run directory is there."""
        for name in chosen(names):
            self._guarded(name, lambda name=name: self._opened(name, run))

    def _opened(self, name: str, run: Run) -> None:
        self._open[name] = import_module(f"{__name__}.{name}").Place(run)

    def numbers(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl."""
        values = {k: float(v) for k, v in row.items() if k != "step" and _is_number(v)}
        for name, tracker in list(self._open.items()):
            self._guarded(name, lambda tracker=tracker: tracker.numbers(row["step"], values))

    def text(self, step: int, name: str, text: str) -> None:
        for place, tracker in list(self._open.items()):
            self._guarded(place, lambda tracker=tracker: tracker.text(step, name, text))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._guarded(name, tracker.close)
        self._open.clear()

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        """An error of a tracker, whatever it is, is told and leaves that tracker out."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - told, not swallowed
            self._open.pop(name, None)
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            self._tell(f"log.trackers: {name} failed and is left out: {why}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
