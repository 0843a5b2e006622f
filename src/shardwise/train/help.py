"""`shardwise train --help`, drawn by tyro from the configuration dataclasses and the texts under
their keys."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TextIO

import tyro

from shardwise.train.config import (
    CheckpointConfig,
    DataConfig,
    DecoderConfig,
    HFModelConfig,
    LogConfig,
    LoraConfig,
    MeshConfig,
    OffloadConfig,
    OptimConfig,
    ReplicasConfig,
    RunConfig,
    ShardConfig,
    TrainConfig,
)

_DESCRIPTION = (
    "Train a model, sharded over ranks. Without a CONFIG.toml it trains the built-in decoder on "
    "the Python standard library's own source files. Options override the file; the run directory "
    "keeps the effective configuration, and starting again continues there."
)


# The keys of another kind of model have a group of their own, and the same section.
_OF_KIND = re.compile(r"--model( \(kind \w+\))([^│\n]*)│")


@dataclass
class _Command:
    config: Annotated[
        tyro.conf.Positional[str | None],
        tyro.conf.arg(metavar="[CONFIG.toml]", name="config", help_behavior_hint=""),
    ] = None
    """Configuration file with the sections below."""
    nproc: Annotated[
        int | None,
        tyro.conf.arg(metavar="N", help_behavior_hint="(default: one per GPU, or 2 on CPU)"),
    ] = None
    """Ranks to start here."""
    port: int = 0
    """Port for the ranks to meet at; 0: a free one."""
    max_restarts: Annotated[int, tyro.conf.arg(metavar="N", name="max-restarts")] = 0
    """How often ranks that fail are started again, from the last complete checkpoint."""
    min_ranks: Annotated[
        int | None,
        tyro.conf.arg(metavar="N", name="min-ranks", help_behavior_hint="(default: all again)"),
    ] = None
    """A restart may leave out ranks that were killed, down to this many."""
    requeue: Annotated[bool, tyro.conf.arg(metavar="", help_behavior_hint="")] = False
    """End with 75, not 0, when asked to stop with steps left: the scheduler starts it again."""
    run: RunConfig = field(default_factory=RunConfig)
    model: DecoderConfig = field(default_factory=DecoderConfig)
    model_hf: Annotated[HFModelConfig, tyro.conf.arg(name="model (kind hf)")] = field(
        default_factory=HFModelConfig
    )
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    shard: ShardConfig = field(default_factory=ShardConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


class _AsTyped:
    """A stream that shows options and values as the documents have them and people type them; all
    of the same length as what tyro writes, whose boxes depend on it."""

    _NAMES: ClassVar = {
        "{True,False}": "{true,false}",
        "True)": "true)",  # of a default, which may stand on the next line
        "False)": "false)",
        "--max_restarts": "--max-restarts",
        "--min_ranks": "--min-ranks",
    }

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        for python, typed in self._NAMES.items():
            text = text.replace(python, typed)
        text = _OF_KIND.sub(lambda m: f"--model{m[2]}{' ' * len(m[1])}│", text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_help() -> None:
    screen: Any = _AsTyped(sys.stdout)
    # SystemExit is argparse's way to end after help.
    with contextlib.redirect_stdout(screen), contextlib.suppress(SystemExit):
        tyro.cli(
            _Command,
            prog="shardwise train",
            description=_DESCRIPTION,
            args=["--help"],
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )
