"""Run test bodies on several ranks, in processes that are kept from test to test.

    @on_ranks(2)                                  # or on_ranks(1, 2, 3, 4): one test for each size
    def test_sum(rank, world, tmp_path):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)                        # the default group is Gloo over all ranks
        assert x.item() == sum(range(world))

The test passes when the body returned on every rank. A body takes `rank`, `world` and whatever
fixtures and parameters it names, as long as those can be pickled; it is found again by module and
name in the rank process, so it must not be nested in another function.

    results = run_ranks(2, function, *args)       # function(rank, world, *args) on the same pool
    with spawn_ranks(2, function, *args) as group: ...   # fresh processes, for tests that end ranks

Cost on 2 cores: about 2 s for the first test (torch is loaded once, in a fork server), 0.1 s for
each further world size, a few ms for each further test. After a failed test the ranks of that size
are replaced, since their state may be bad. The rank's side is rank_worker.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

import rank_worker
from rank_worker import BodyOf, Job, RankSpec, Report, announce

__all__ = ["Outcome", "RankError", "RankGroup", "announce", "on_ranks", "run_ranks", "spawn_ranks"]

START_TIMEOUT_S = 90.0  # for a fork server under load; 3 s when the machine is quiet
GRACE_S = 2.0  # what the other ranks get once one has failed: most fail too, or wait for it forever
STACK_DUMP_S = 1.0  # for the ranks to write their stacks
LOG_TAIL_CHARS = 6_000
# torch._dynamo: the first optimizer step of a process imports it, 0.6 s
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch._dynamo",
    "pytest",
)


# Set by conftest.py: load torch in the fork server while pytest still collects.
start_early = False


class RankError(AssertionError):
    """A rank failed, died or did not end; the text shows every rank, the first cause first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended on one rank.

    kind: ok, failed (text is the traceback), skipped (text is the reason), died (text says how),
    running (text is the stacks of its threads).
    """

    rank: int
    kind: str
    elapsed_s: float
    text: str = ""
    value: Any = None
    output: str = ""
    stale: str = ""


def on_ranks(
    *worlds: int, timeout_s: float = 60.0, backend: str = "gloo"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a body that runs on every rank, once for each of the world sizes."""
    if not worlds or not all(isinstance(world, int) and world >= 1 for world in worlds):
        raise ValueError(f"on_ranks takes one or more world sizes, got {worlds}: @on_ranks(1, 2)")

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        if "<locals>" in body.__qualname__:
            raise ValueError(f"{body.__qualname__}: rank bodies must not be nested in a function")
        if start_early:
            _fork_server()
        wants = inspect.signature(body).parameters

        @functools.wraps(body)
        def test(*owner: Any, world: int, **values: Any) -> None:
            if "world" in wants:
                values["world"] = world
            calls = [{**values, "rank": r} if "rank" in wants else values for r in range(world)]
            target = BodyOf(body.__module__, body.__qualname__)
            outcomes = _run_on_pool(world, backend, target, [((), c) for c in calls], timeout_s)
            _judge(outcomes, timeout_s)

        parameters = [p for name, p in wants.items() if name not in ("rank", "world")]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("world", keyword))
        marked: Any = pytest.mark.parametrize("world", worlds, ids=[f"{w}ranks" for w in worlds])(
            test
        )
        marked = pytest.mark.timeout(timeout_s + START_TIMEOUT_S)(marked)
        marked.rank_body = body
        marked.__signature__ = inspect.Signature(parameters)
        return marked

    return decorate


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Run function(rank, world, *args, **kwargs) on every rank of the pool; results in rank order.

    Raises RankError when a rank fails. The function must be importable (top level of a module).
    """
    calls = [((rank, world, *args), kwargs) for rank in range(world)]
    outcomes = _run_on_pool(world, "gloo", function, calls, timeout_s)
    if any(outcome.kind != "ok" for outcome in outcomes):
        raise RankError(describe(outcomes, timeout_s))
    return [outcome.value for outcome in outcomes]


def spawn_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str | None = "gloo",
    **kwargs: Any,
) -> RankGroup:
    """Start function(rank, world, *args, **kwargs) on fresh rank processes and return at once.

        with spawn_ranks(2, train, tmp_path) as group:
            group.wait_for("saved", rank=1)       # the body called announce("saved")
            group.kill(1)
            outcomes = group.join(timeout_s=20)

    backend=None: no process group is made (the environment is torchrun's, the body may make one).
    """
    group = RankGroup(world, backend)
    try:
        group.submit(function, [((rank, world, *args), kwargs) for rank in range(world)])
    except BaseException:
        group.close()
        raise
    return group


class RankGroup:
    """The rank processes of one world, their pipes and their store."""

    def __init__(self, world: int, backend: str | None = "gloo") -> None:
        import torch.distributed as dist

        # Port 0: the system chooses, and the port is bound before anyone hears of it.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))
        self._started_s = time.monotonic()
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._outcomes: dict[int, Outcome] = {}
        _open_groups.append(self)
        try:
            context = _fork_server()
            for rank in range(world):
                spec = RankSpec(rank, world, backend, self.store.port, str(self._log(rank)))
                mine, theirs = context.Pipe()
                process = context.Process(target=rank_worker.main, args=(theirs, spec))
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(mine)
            outcomes = self.join(START_TIMEOUT_S, GRACE_S)
            if any(outcome.kind != "ready" for outcome in outcomes):
                raise RankError("ranks did not start\n" + describe(outcomes, START_TIMEOUT_S))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes]

    def submit(self, function: Any, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Send function and each rank's (args, kwargs); join() collects what became of it."""
        messages = [_pickled(function, args, kwargs) for args, kwargs in calls]
        self._outcomes = {}
        self._started_s = time.monotonic()
        for pipe, message in zip(self._pipes, messages, strict=True):
            # A rank that is dead already is reported by join().
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send_bytes(message)

    def join(
        self,
        timeout_s: float = 60.0,
        grace_s: float | None = None,
        ranks: Collection[int] | None = None,
    ) -> list[Outcome]:
        """Wait until every rank has ended its job, or time is up; outcomes in rank order.

        grace_s shortens the wait once a rank has failed or died; `ranks` are those to wait for,
        where others will never end. May be called again to wait on.
        """
        deadline = time.monotonic() + timeout_s
        asked = range(len(self._pipes)) if ranks is None else ranks
        pending = {self._pipes[r]: r for r in asked if r not in self._outcomes}
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = pending.pop(pipe)
                self._outcomes[rank] = outcome = self._receive(rank, pipe)
                if grace_s is not None and outcome.kind in ("failed", "died"):
                    deadline = min(deadline, time.monotonic() + grace_s)
        known = {**self._outcomes, **self._stacks(list(pending.values()))}
        return [known[rank] for rank in sorted(known)]

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        if self._processes[rank].is_alive():
            os.kill(self._processes[rank].pid, signal_number)

    def wait_for(self, name: str, *, rank: int, timeout_s: float = 60.0) -> None:
        """Wait until the body on this rank has called announce(name)."""
        deadline = time.monotonic() + timeout_s
        while not self.store.check([f"announce/{name}/{rank}"]):
            if not self._processes[rank].is_alive():
                raise RankError(
                    f"rank {rank} died before it announced '{name}'\n{self.output(rank)}"
                )
            if time.monotonic() > deadline:
                raise RankError(f"rank {rank} did not announce '{name}' within {timeout_s:g} s")
            time.sleep(0.005)

    def output(self, rank: int) -> str:
        """What the rank has written to stdout and stderr since its job began."""
        try:
            return self._log(rank).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def close(self) -> None:
        """End the processes: idle ones leave as their pipe closes, busy ones are killed."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 0.5
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                _kill_group(process)
        for process in self._processes:
            process.join()
            process.close()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)
        if self in _open_groups:
            _open_groups.remove(self)

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _receive(self, rank: int, pipe: Any) -> Outcome:
        try:
            report: Report = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5.0)
            how = _describe_exit(self._processes[rank].exitcode)
            elapsed_s = time.monotonic() - self._started_s
            return Outcome(rank, "died", elapsed_s, how, output=self.output(rank))
        elapsed_s = report.at_s - self._started_s
        kind, text, value = report.kind, report.text, None
        if report.value:
            try:
                value = pickle.loads(report.value)
            except Exception as error:
                kind = "failed"
                text = f"the rank's result cannot be read in the parent: {error!r}\n"
        return Outcome(rank, kind, elapsed_s, text, value, self.output(rank), report.stale)

    def _stacks(self, ranks: list[int]) -> dict[int, Outcome]:
        """Ask ranks that are still running where they are."""
        before = {rank: self.output(rank) for rank in ranks}
        for rank in ranks:
            self.kill(rank, rank_worker.DUMP_STACKS)
        deadline = time.monotonic() + STACK_DUMP_S
        found: dict[int, Outcome] = {}
        for rank in ranks:
            text = ""
            # The outermost frame of the main thread, which faulthandler writes last.
            while "in <module>" not in text and time.monotonic() < deadline:
                time.sleep(0.01)
                text = self.output(rank)[len(before[rank]) :]
            ours = ("/multiprocessing/", "rank_worker.py", "<string>")
            lines = [line for line in text.splitlines() if not any(part in line for part in ours)]
            elapsed_s = time.monotonic() - self._started_s
            stacks = "\n".join(lines) or "(it did not write its stacks)"
            found[rank] = Outcome(rank, "running", elapsed_s, stacks, output=before[rank])
        return found


def describe(outcomes: list[Outcome], timeout_s: float) -> str:
    """All ranks in words: failures and deaths by time, then those that still run, then the rest."""
    said = {"failed": "failed", "died": "died", "running": "is still running"}
    bad = [outcome for outcome in outcomes if outcome.kind in said]
    bad.sort(key=lambda outcome: (outcome.kind == "running", outcome.elapsed_s))
    lines = []
    if bad and bad[0].kind == "running":
        lines.append(
            f"the time limit of {timeout_s:g} s is over; the stacks of ranks that still run:"
        )
    for outcome in bad:
        line = f"--- rank {outcome.rank} of {len(outcomes)} {said[outcome.kind]} after"
        is_first_cause = outcome is bad[0] and len(bad) > 1 and outcome.kind != "running"
        cause = " (the first cause)" if is_first_cause else ""
        lines += [f"{line} {outcome.elapsed_s:.2f} s{cause}", outcome.text.rstrip()]
        if outcome.output:
            lines += [
                f"... output of rank {outcome.rank}:",
                outcome.output[-LOG_TAIL_CHARS:].rstrip(),
            ]
    for outcome in outcomes:
        if outcome not in bad:
            line = f"--- rank {outcome.rank} of {len(outcomes)}: {outcome.kind}"
            lines.append(f"{line} after {outcome.elapsed_s:.2f} s")
    return "\n".join(lines)


def _judge(outcomes: list[Outcome], timeout_s: float) -> None:
    kinds = {outcome.kind for outcome in outcomes}
    if kinds == {"skipped"}:
        pytest.skip(outcomes[0].text)
    if kinds != {"ok"}:
        pytest.fail(describe(outcomes, timeout_s), pytrace=False)
    for outcome in outcomes:
        for line in outcome.output.splitlines():
            print(f"[rank {outcome.rank}] {line}")


def _run_on_pool(
    world: int,
    backend: str,
    function: Any,
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]],
    timeout_s: float,
) -> list[Outcome]:
    key = (world, backend)
    if key not in _pools:
        _pools[key] = RankGroup(world, backend)
    group = _pools[key]
    keep = False
    try:
        group.submit(function, calls)
        outcomes = group.join(timeout_s, GRACE_S)
        keep = all(o.kind in ("ok", "skipped") and not o.stale for o in outcomes)
        return outcomes
    finally:
        # Also when pytest's own time limit or Ctrl-C ends the wait: the ranks' state is unknown.
        if not keep:
            del _pools[key]
            group.close()


def _pickled(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        call = pickle.dumps((function, args, kwargs))
    except Exception as error:
        found = _unpicklable(function, args, kwargs)
        culprits = [f"{name} ({type(value).__qualname__})" for name, value in found]
        raise ValueError(
            f"cannot send {', '.join(culprits) or 'the call'} to the ranks: {error}. "
            "They take importable functions, and values that pickle (tmp_path, numbers, tensors)."
        ) from error
    return pickle.dumps(Job(tuple(sys.path), call))


def _unpicklable(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    positional = [(f"argument {position}", value) for position, value in enumerate(args)]
    for name, value in [("the function", function), *positional, *kwargs.items()]:
        try:
            pickle.dumps(value)
        except Exception:
            yield name, value


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "its pipe closed, yet the process lives"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def _kill_group(process: Any) -> None:
    # The rank leads a process group of its own, unless it is too young yet.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    # Only what was imported without an error here: in the server an error would be obscure.
    loaded = sorted(name for name in sys.modules if name.split(".")[0] == "shardwise")
    context.set_forkserver_preload([*PRELOAD, *loaded])
    # Thread pools read these as they are loaded, and forking is safe without threads only.
    with _environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_pools: dict[tuple[int, str], RankGroup] = {}
_open_groups: list[RankGroup] = []


@atexit.register
def close_all() -> None:
    """End every rank process that this process has started."""
    _pools.clear()
    while _open_groups:  # close() takes the group out
        _open_groups[-1].close()
