"""Starts the ranks of a job on this machine, with the environment that torchrun gives them.

    shardwise train CONFIG ...   -> this launcher -> N times `python -m shardwise.train CONFIG ...`
    torchrun -m shardwise.train CONFIG ...        -> the same ranks, started by somebody else

The launcher lets the ranks finish: SIGTERM and the first Ctrl-C reach them as a stop file, which
they look for once a step (each rank runs in its own session, so the terminal's Ctrl-C does not). A
second signal ends all at once. When the launcher itself is killed, the kernel ends the ranks
(`worker.die_with_launcher`).

With `--max-restarts` ranks that fail are started again, on those that are left where `--min-ranks`
allows it (`restarts`).
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from shardwise.checkpoint.store import list_checkpoints
from shardwise.errors import ConfigError
from shardwise.train.config import Config
from shardwise.train.config_checks import world_problems
from shardwise.train.config_file import LoadedConfig
from shardwise.train.meeting import listen, open_store, stay_on_loopback
from shardwise.train.restarts import EXIT_USER, Failure, Restarts
from shardwise.train.run_dir import RunDir, finished, lacks_model
from shardwise.train.stop import LAUNCHER_VARIABLE, STOP_FILE_VARIABLE
from shardwise.units import counted

_DEFAULT_CPU_RANKS = 2
ENDING_S = 5.0  # for ranks that run on when another one has failed; then they are killed
_LOOK_S = 0.05  # between looks at the ranks


def launch(
    loaded: LoadedConfig,
    arguments: Sequence[str],
    nproc: int | None,
    port: int,
    restarts: Restarts | None = None,
) -> int:
    """Checks what can be checked without the ranks, runs them with `arguments`, returns the exit
    code."""
    restarts = restarts or Restarts()
    RunDir(loaded.config).check()
    if nproc is not None:  # before the seconds that importing torch takes
        _check_world(loaded, nproc)
        restarts.check(loaded.config, nproc)
    if loaded.config.run.device == "cuda":
        _resolve_ranks(loaded, nproc)  # a mistake, also where nothing is left to do
    if (done := finished(loaded.config)) and not lacks_model(loaded.config):  # else: by the ranks
        print(done)
        return 0
    listen(port).close()  # a taken port is found before torch is imported
    stay_on_loopback()
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        stop_file = Path(folder, "stop")
        _forward_signals(stop_file)
        nproc = _resolve_ranks(loaded, nproc)
        _check_world(loaded, nproc)
        restarts.check(loaded.config, nproc)
        os.environ[STOP_FILE_VARIABLE] = str(stop_file)
        os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // nproc)))
        command = ["-m", "shardwise.train", *arguments]
        return _run_until_done(loaded, command, nproc, port, stop_file, restarts)


def _run_until_done(
    loaded: LoadedConfig,
    command: list[str],
    nproc: int,
    port: int,
    stop_file: Path,
    restarts: Restarts,
) -> int:
    """Runs the ranks, again where they fail and `restarts` allows it; the exit code."""
    for number in range(1, restarts.most + 2):
        if stop_file.exists():  # asked to stop while torch was imported, or after a failure
            return 0
        ends = _run(command, nproc, port)
        codes = ends.codes
        if not codes:
            return 0
        failure = Failure.of(codes, ends.killed)
        if EXIT_USER in codes.values():
            return EXIT_USER
        if stop_file.exists() and set(codes.values()) <= {-signal.SIGTERM, -signal.SIGINT}:
            return 0  # asked to stop before the ranks could listen: there is nothing to save yet
        if number > restarts.most or failure.is_final or stop_file.exists():
            _say(f"{failure}; the other ranks were ended. {_what_next(loaded.config, failure)}")
            return 1
        before, nproc = nproc, restarts.next_ranks(loaded, nproc, failure.num_lost)
        start = _start(loaded.config) or "the beginning"
        _say(
            f"{failure}; restart {number} of {restarts.most} on {counted(nproc, 'rank')}"
            f"{f' instead of {before}' if nproc != before else ''}, from {start}"
        )
    raise AssertionError("the last round returns")


@dataclass(frozen=True, slots=True)
class Ends:
    """Exit codes of ranks that failed, the first to end first, and those that had to be killed."""

    codes: dict[int, int]
    killed: frozenset[int]


def _run(command: list[str], nproc: int, port: int) -> Ends:
    """Runs the ranks once. When one has failed the others have ENDING_S to say what they know."""
    store, meeting = open_store(port)
    ranks = {}
    for rank in range(nproc):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        sizes = {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), "GROUP_WORLD_SIZE": "1"}
        environment = {**os.environ, **meeting, **place, **sizes}
        ranks[rank] = subprocess.Popen(
            [sys.executable, *command], env=environment, start_new_session=True
        )
    codes: dict[int, int] = {}
    killed: set[int] = set()
    end_at = math.inf
    while ranks:
        for rank, process in list(ranks.items()):
            if (code := process.poll()) is None:
                continue
            del ranks[rank]
            if code and not codes:
                end_at = time.monotonic() + ENDING_S
                for other in ranks.values():
                    other.terminate()
            if code:
                codes[rank] = code
        if time.monotonic() > end_at:
            end_at = math.inf
            killed |= set(ranks)
            for process in ranks.values():
                process.kill()
        time.sleep(_LOOK_S)
    del store
    return Ends(codes, frozenset(killed))


def _start(config: Config) -> str:
    """Where the next start goes on; empty where nothing was saved."""
    from shardwise.train.memory import has_copies

    run_dir, resume = RunDir(config), config.checkpoint.resume
    if list_checkpoints(run_dir.checkpoints).complete or has_copies(run_dir):
        has_memory = config.checkpoint.memory_every > 0
        return f"the last checkpoint{' or copy in memory' if has_memory else ''}"
    if resume not in ("auto", "off"):
        return resume
    return ""


def _what_next(config: Config, failure: Failure) -> str:
    if failure.is_final:
        return "Another start would end alike"
    if start := _start(config):
        return f"Start again to continue from {start}"
    return "There is no checkpoint yet: another start begins at step 0"


def _say(text: str) -> None:
    print(f"shardwise train: {text}", file=sys.stderr, flush=True)


def _forward_signals(stop_file: Path) -> None:
    def forward(number: int, frame: FrameType | None) -> None:
        if stop_file.exists():
            os._exit(128 + number)  # the second time: now; the ranks die with us
        # Whole at once, since the ranks may look at any moment.
        draft = stop_file.with_suffix(".new")
        draft.write_text(signal.Signals(number).name)
        draft.rename(stop_file)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)


def _check_world(loaded: LoadedConfig, nproc: int) -> None:
    for key, text in world_problems(loaded.on(nproc).config, nproc):
        raise loaded.error(key, text)


def _resolve_ranks(loaded: LoadedConfig, nproc: int | None) -> int:
    """As asked, but no more than there are GPUs; by default all GPUs, else 2 ranks on CPU."""
    device = loaded.config.run.device
    if device == "cpu":
        return nproc or _DEFAULT_CPU_RANKS
    import torch

    num_gpus = torch.cuda.device_count()
    if device == "cuda" and not num_gpus:
        raise loaded.error(
            "run.device", "cuda is asked for, but torch sees no GPU; use auto or cpu"
        )
    if num_gpus and nproc is not None and nproc > num_gpus:
        raise ConfigError(
            f"--nproc: {nproc} ranks, but {counted(num_gpus, 'GPU')}; use fewer, or run.device cpu"
        )
    return nproc or num_gpus or _DEFAULT_CPU_RANKS


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
