"""What all processes of a run know, as a file in its folder; and what a stage is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_hour_parts.device import Device

FILE = "settings.json"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """`is_dry`: sizes for a minute on a CPU."""

    kind: str
    world: int
    is_dry: bool
    folder: str

    def write(self) -> None:
        (Path(self.folder) / FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: str) -> Settings:
        return cls(**json.loads((Path(folder) / FILE).read_text()))


@dataclass(frozen=True, slots=True)
class Context:
    """What a rank of a stage has."""

    settings: Settings
    device: Device
    rank: int
    world: int

    @property
    def is_dry(self) -> bool:
        return self.settings.is_dry

    @property
    def folder(self) -> Path:
        return Path(self.settings.folder)


@dataclass(frozen=True, slots=True)
class Stage:
    """Some items, one after the other, on ranks of their own.

    `run` gives the row of an item; rank 0's counts. A row may set `state` to "wrong" or "skipped",
    with `why`. An item that ends in an exception, a crash or its time limit is "failed", and the
    stage goes on with the next one on fresh ranks.
    """

    name: str
    about: str
    items: Callable[[Settings], list[str]]
    run: Callable[[str, Context], Row]
    columns: tuple[str, ...]  # of its table, names of what rows hold
    minutes: float  # of an hour
    item_limit_s: float = 120.0
    is_alone: bool = False  # one process, no process group
    needs: str = ""  # "cuda", "accelerator"
    environment: Mapping[str, str] = field(default_factory=dict)

    def why_skipped(self, device: Device) -> str:
        """Empty where it can run."""
        if self.needs == "cuda" and not device.is_cuda:
            return "needs a GPU"
        if self.needs == "accelerator" and not device.is_accelerator:
            return "needs a GPU"
        return ""
