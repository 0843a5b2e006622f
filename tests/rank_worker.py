"""What a rank process of the test pool runs: wait for a job, run it, reset the process, report.

The parent's side is ranks.py. A rank is forked from a server that has torch loaded. Its life:

    guard against orphans -> output to a log file -> process group -> "ready"
    -> { job -> reset -> report }*

A rank ends when its pipe closes, and the kernel ends it when the fork server goes, so that none
survives pytest, however pytest ended.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import importlib
import multiprocessing.forkserver
import os
import pickle
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1
DUMP_STACKS = signal.SIGUSR1
# Above any test's own limit: the pool's limit, which shows stacks, must come first.
PROCESS_GROUP_TIMEOUT = datetime.timedelta(minutes=20)
# Groups that tests make stay alive, because DTensor's caches refer to them; the pool is replaced
# when it has this many.
MAX_GROUPS = 48


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Who this process is, and where it meets the others."""

    rank: int
    world: int
    backend: str | None
    store_port: int
    log_path: str


@dataclass(frozen=True, slots=True)
class BodyOf:
    """A test body by name; the decorated function itself cannot be pickled by reference."""

    module: str
    qualname: str

    def resolve(self) -> Any:
        """The undecorated body; a method is bound to a fresh instance of its class."""
        owner: Any = None
        target: Any = importlib.import_module(self.module)
        for name in self.qualname.split("."):
            owner, target = target, getattr(target, name)
        body = target.rank_body
        return body.__get__(owner()) if isinstance(owner, type) else body


@dataclass(frozen=True, slots=True)
class Job:
    """A call, pickled by the parent. sys_path makes the parent's test modules importable here."""

    sys_path: tuple[str, ...]
    call: bytes  # pickle of (function or BodyOf, args, kwargs)


@dataclass(frozen=True, slots=True)
class Report:
    """How a job ended on one rank. Monotonic times compare across the processes of one host."""

    kind: str  # ready, ok, failed, skipped
    at_s: float
    text: str = ""
    value: bytes = b""
    stale: str = ""  # why this process must not serve another test


_identity: tuple[Any, RankSpec] | None = None


def announce(name: str) -> None:
    """Tell the parent that this rank has come this far; RankGroup.wait_for waits for it."""
    assert _identity is not None, "announce() works in rank bodies only"
    store, spec = _identity
    store.set(f"announce/{name}/{spec.rank}", b"1")


def main(conn: Connection, spec: RankSpec) -> None:
    """The whole life of a rank process; never returns."""
    # What the fork server loaded is no garbage: a collection that walks it takes 110 ms and copies
    # its pages.
    gc.freeze()
    _die_with_parent()
    log = _send_output_to(spec.log_path)
    faulthandler.enable(file=log)
    faulthandler.register(DUMP_STACKS, file=log, all_threads=True)
    try:
        reset = _connect(spec)
    except BaseException as error:
        conn.send_bytes(pickle.dumps(_failure(error)))
        os._exit(1)
    conn.send_bytes(pickle.dumps(Report("ready", time.monotonic())))
    while True:
        try:
            message = conn.recv_bytes()
        except EOFError:
            # Destructors of Gloo and CUDA may wait for peers that are gone: leave without them.
            os._exit(0)
        os.ftruncate(log.fileno(), 0)
        report = reset.after(_run(pickle.loads(message)))
        sys.stdout.flush()
        sys.stderr.flush()
        conn.send_bytes(pickle.dumps(report))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The fork server ends when the last copy of this descriptor closes; a rank that hangs would
    # keep it, and with it itself, alive after pytest was killed.
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_alive_fd is not None:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), server._forkserver_alive_fd)
    # A process group of its own: Ctrl-C reaches pytest only, and what a body starts ends with it.
    os.setpgid(0, 0)


def _send_output_to(path: str) -> Any:
    log = open(path, "ab", buffering=0)  # noqa: SIM115 - stays open as long as the process lives
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return log


def _connect(spec: RankSpec) -> Reset:
    global _identity  # noqa: PLW0603 - announce() is called by bodies, which hold no handle
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(spec.rank),
        WORLD_SIZE=str(spec.world),
        LOCAL_RANK=str(spec.rank),
        LOCAL_WORLD_SIZE=str(spec.world),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(spec.store_port),
        # The parent serves the store, as torchrun's agent does.
        TORCHELASTIC_USE_AGENT_STORE="True",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    store = dist.TCPStore("127.0.0.1", spec.store_port, is_master=False)
    _identity = (store, spec)
    if spec.backend is not None:
        dist.init_process_group(
            spec.backend,
            store=dist.PrefixStore("default", store),
            rank=spec.rank,
            world_size=spec.world,
            timeout=PROCESS_GROUP_TIMEOUT,
        )
    _rewrite_asserts()
    return Reset()


def _rewrite_asserts() -> None:
    """Let asserts of test modules explain themselves here as they do under pytest."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


def _run(job: Job) -> Report:
    import pytest

    try:
        sys.path[:] = job.sys_path
        function, args, kwargs = pickle.loads(job.call)
        if isinstance(function, BodyOf):
            function = function.resolve()
        value = function(*args, **kwargs)
    except pytest.skip.Exception as skip:
        return Report("skipped", time.monotonic(), text=str(skip))
    except BaseException as error:
        return _failure(error)
    try:
        return Report("ok", time.monotonic(), value=pickle.dumps(value))
    except Exception as error:
        text = f"the rank's result ({type(value).__qualname__}) cannot be pickled: {error}\n"
        return Report("failed", time.monotonic(), text=text + "Return plain tensors and values.\n")


def _failure(error: BaseException) -> Report:
    at_s = time.monotonic()
    traceback_here = error.__traceback__
    # The first frame is this file's; the reader wants the body's.
    beyond = traceback_here.tb_next if traceback_here else None
    text = "".join(traceback.format_exception(type(error), error, beyond or traceback_here))
    return Report("failed", at_s, text=text)


class Reset:
    """Brings the process back to the state that it had before its first job."""

    def __init__(self) -> None:
        import torch

        self._environ = dict(os.environ)
        self._cwd = os.getcwd()
        self._default_group = self._current_group()
        torch.manual_seed(0)

    def after(self, report: Report) -> Report:
        """The report of the job, or a failure report when the reset itself failed."""
        try:
            self._reset()
            stale = self._stale()
        except BaseException as error:
            failed = _failure(error)
            text = report.text + "resetting the rank after the test failed:\n" + failed.text
            return Report("failed", failed.at_s, text=text)
        return Report(report.kind, report.at_s, report.text, report.value, stale)

    def _reset(self) -> None:
        import torch

        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        torch.set_autocast_enabled("cpu", False)
        torch.set_num_threads(1)
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None and dynamo.utils.counters["frames"]:
            dynamo.reset()
            dynamo.utils.counters.clear()
        if dict(os.environ) != self._environ:
            os.environ.clear()
            os.environ.update(self._environ)
        os.chdir(self._cwd)
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        torch.manual_seed(0)
        gc.collect()
        module = sys.modules.get("shardwise.engine.module")
        if module is not None and module._also:
            sys.modules["shardwise.install"].uninstall()
            module.count_as(())
            raise AssertionError("the test left install() in force")

    def _stale(self) -> str:
        import torch.distributed as dist

        if self._current_group() is not self._default_group:
            return "the test replaced or destroyed the default process group"
        num_groups = len(dist.distributed_c10d._world.pg_map)
        if num_groups > MAX_GROUPS:
            return f"{num_groups} process groups have gathered"
        return ""

    @staticmethod
    def _current_group() -> Any:
        import torch.distributed as dist

        return dist.group.WORLD if dist.is_initialized() else None
