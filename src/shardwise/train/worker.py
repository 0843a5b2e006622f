"""One rank as a process: from the environment that torchrun sets to an exit code.

Exit codes: 0 finished or stopped on request, 2 a user's mistake (one line on stderr), 3 another
rank failed (so that the launcher can tell the cause from its consequences), 4 all ranks agree that
training cannot go on (another start would end alike), 1 anything else.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint.ranks import Ranks
from shardwise.comm.limits import wait_limit_s, warn_after_s
from shardwise.comm.waits import Told
from shardwise.errors import (
    ConfigError,
    ShardwiseError,
    TrainingError,
    TransportError,
    UnavailableError,
)
from shardwise.train import limits
from shardwise.train.config import Config
from shardwise.train.config_file import LoadedConfig
from shardwise.train.job import train
from shardwise.train.meeting import stay_on_loopback
from shardwise.train.numa import bind
from shardwise.train.restarts import EXIT_ERROR, EXIT_FINAL, EXIT_OTHER_RANK, EXIT_USER
from shardwise.train.stop import LAUNCHER_VARIABLE, StopRequest
from shardwise.train.waiting import be_patient

_PR_SET_PDEATHSIG = 1
# Times a warning of a wait: ranks import at their own pace.
_START_PATIENCE = 3
_START_LIMITS = 5  # times the limit of a wait: programs and data come from slow disks
_SHOWN = 64  # ranks in one text
# What c10d and Gloo say on the ranks that did not fail themselves.
_LOST_PEER = ("connection closed by peer", "connection reset", "broken pipe", "remote process")


def run_rank(loaded: LoadedConfig, stop: StopRequest) -> int:
    """Runs this rank of the job and returns its exit code."""
    die_with_launcher()
    rank = int(os.environ["RANK"])
    ranks: Ranks | None = None
    try:
        device = _device(loaded)
        if loaded.config.run.numa == "auto":
            bind(device)
        found = _join(device, stop)
        if found is None:
            return 0
        ranks = found
        be_patient(rank)
        train(loaded, ranks, device, stop)
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - the process ends here
        return _report(error, rank, ranks)
    return 0


def _report(error: BaseException, rank: int, ranks: Ranks | None) -> int:
    """Says once what happened, in a line if it was foreseen; returns the exit code."""
    agreed = ranks is not None and ranks.agreed_error is error
    if found := limits.explain(error):
        if not agreed or rank == (ranks.reporter if ranks else rank):
            where = (
                "" if isinstance(error, ShardwiseError) else f"\n{traceback.format_exc().rstrip()}"
            )
            _say(f"{_first_line(error)}: {found}{where}", rank)
        return EXIT_FINAL
    if _is_lost_peer(error):
        text = str(error) if isinstance(error, TransportError) else _first_line(error)
        _say(f"another rank has failed: {text}", rank)
        return EXIT_OTHER_RANK
    if ranks is None or not agreed or rank == ranks.reporter:
        text = str(error)
        if not isinstance(error, ShardwiseError):
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc().rstrip()}"
        _say(text, None if agreed else rank)
    if isinstance(error, ConfigError | UnavailableError):
        return EXIT_USER
    return EXIT_FINAL if agreed and isinstance(error, TrainingError) else EXIT_ERROR


def exit_now(code: int) -> None:
    """Ends the process without waiting for peers, threads or process groups that may be stuck."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_launcher() -> None:
    """Ends this process when `shardwise train`, which started it, is killed: no rank lives on."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(int(launcher),), daemon=True).start()
    if os.getppid() != int(launcher):  # it died before we asked
        exit_now(1)


def _watch_parent(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(0.5)
    exit_now(1)


def _device(loaded: LoadedConfig) -> torch.device:
    config: Config = loaded.config
    kind, has_cuda = config.run.device, torch.cuda.is_available()
    if kind == "cuda" and not has_cuda:
        raise loaded.error(
            "run.device", "cuda is asked for, but torch sees no GPU; use auto or cpu"
        )
    if kind == "cpu" or not has_cuda:
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise loaded.error(
            "run.device",
            f"local rank {local_rank} has no GPU of its own ({torch.cuda.device_count()} here); "
            "start fewer ranks, or use cpu",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _join(device: torch.device, stop: StopRequest) -> Ranks | None:
    """Joins the job; rank exchanges of Python objects and numbers go over Gloo on any device. None
    where a rank was asked to stop before all were there."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    options: dict[str, Any] = {} if device.type == "cpu" else {"device_id": device}
    try:
        place = _meeting_place()
        if not _all_are_there(**place, stop=stop):
            return None
        with Told("all ranks to connect to each other"):
            dist.init_process_group(backend, **options, **place)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error) and "in use" not in str(error):
            raise TrainingError(f"cannot join the job: {_first_line(error)}") from error
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"MASTER_PORT: {address} is in use by another process; choose a free port"
        ) from error
    except ValueError as error:  # a variable of the environment is missing
        raise ConfigError(f"cannot join the job: {_first_line(error)}") from error
    if device.type == "cpu":
        return Ranks()
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return Ranks(group)


def _meeting_place() -> dict[str, Any]:
    """The store of the job, where this start of it has keys of its own.

    torchrun's agent keeps one store over all restarts (torch 2.13), in which Gloo's addresses of
    the ranks that have ended still stand. The count of restarts is the same on all ranks of one
    agent only: on several hosts, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_host else "0"
    if is_one_host and "GLOO_SOCKET_IFNAME" not in os.environ:
        stay_on_loopback()
    store, rank, world_size = next(dist.rendezvous("env://"))
    name = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/restart_{count}"
    return {"store": dist.PrefixStore(name, store), "rank": rank, "world_size": world_size}


def _all_are_there(store: dist.Store, rank: int, world_size: int, stop: StopRequest) -> bool:
    """Waits in turns, unlike `init_process_group`: so a wait can be told, and a signal is heeded.
    The first to write `start` decides for all whether they go on."""
    store.set(f"there/{rank}", "")
    names = [f"there/{number}" for number in range(world_size)]
    began, warn_at, pause = time.monotonic(), _START_PATIENCE * warn_after_s(), 0.005
    while not store.check(names):
        if stop.by:
            if store.compare_set("start", "", "stopped") == b"stopped":
                if rank == 0:
                    _say(f"stopped by {stop.by} before all ranks had started", None)
                return False
        elif (waited := time.monotonic() - began) > warn_at:
            missing = [r for r, name in enumerate(names[:_SHOWN]) if not store.check([name])]
            whom = f"rank{'s' if missing[1:] else ''} {', '.join(map(str, missing))}"
            text = f"rank {rank} has waited {waited:.0f} s for {whom} to start"
            if waited > _START_LIMITS * wait_limit_s():
                raise TransportError(f"{text}; read their logs first")
            _say(f"{text}: busy importing, stopped, or without a connection to this host", None)
            warn_at = 2 * waited
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)
    return store.compare_set("start", "", "go") == b"go"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _is_lost_peer(error: BaseException) -> bool:
    text = str(error).lower()
    if isinstance(error, TransportError):
        return not isinstance(error, UnavailableError)
    return isinstance(error, RuntimeError) and any(part in text for part in _LOST_PEER)


def _say(text: str, rank: int | None) -> None:
    where = "" if rank is None else f"rank {rank}: "
    print(f"shardwise train: {where}{text}", file=sys.stderr, flush=True)
