"""Jobs that meet through a coordinator: the numbers of one are those of plain training; real
processes survive the death of others."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import TINY, read_rows, run_job, text_file

from ranks import run_ranks
from shardwise.cli import main
from shardwise.replicas.coordinator import Coordinator, Meeting
from shardwise.replicas.outer import OuterSettings

NUM_KILLS = 20


def job(rank: int, world: int, directory: Path, **keys: Any) -> None:
    run_job(directory, train__steps=8, **keys)


def serve(folder: Path, lines: list[str], replicas: int = 1) -> str:
    """A coordinator whose outer step is the whole difference; its address."""
    meeting = Meeting(3, replicas, OuterSettings(lr=1.0, momentum=0.0))
    listener = socket.create_server(("127.0.0.1", 0))
    server = Coordinator(meeting, folder, lines.append)
    threading.Thread(target=server.serve, args=(listener,), daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_one_replica_is_plain_training(tmp_path: Path) -> None:
    """theta - (theta - w) is w but for rounding: losses to 1e-5, over two meetings and a resume
    at a meeting."""
    run_ranks(2, job, tmp_path / "plain")
    lines: list[str] = []
    address = serve(tmp_path / "outer", lines)
    keys = {"replicas__coordinator": address}
    run_ranks(2, job, tmp_path / "alone", stop_after=6, **keys)
    address = serve(tmp_path / "outer", lines)
    run_ranks(2, job, tmp_path / "alone", replicas__coordinator=address)
    plain, alone = read_rows(tmp_path / "plain"), read_rows(tmp_path / "alone")
    assert [row["step"] for row in alone] == list(range(1, 9))
    for row, expected in zip(alone, plain, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert [row.get("round") for row in alone] == [None, None, 1, None, None, 2, None, None]
    assert "goes on at round 2" in lines and lines[-1].endswith("has left")


def test_a_job_that_waits_for_others_can_be_stopped_and_has_written_nothing(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    address = serve(tmp_path / "outer", lines, replicas=2)
    run_ranks(2, job, tmp_path / "run", stop_after=3, replicas__coordinator=address)
    assert not (tmp_path / "run" / "config.toml").exists()
    end = time.monotonic() + 10
    while not any(line.endswith("is gone") for line in lines):
        assert time.monotonic() < end, lines
        time.sleep(0.01)


def test_one_of_another_model_is_refused_with_nothing_written(tmp_path: Path) -> None:
    address = serve(tmp_path / "outer", [])
    run_ranks(1, job, tmp_path / "a", stop_after=3, replicas__coordinator=address)
    address = serve(tmp_path / "outer", [])
    with pytest.raises(BaseException, match="does not fit"):
        run_ranks(1, job, tmp_path / "b", model__dim=64, replicas__coordinator=address)
    assert not (tmp_path / "b" / "config.toml").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"replicas.coordinator": "host"}, "replicas.coordinator: 'host' is no address"),
        ({"mesh.replicate": 2}, "mesh.replicate: is for replicas of one job"),
        ({"shard.strategy": "no_shard"}, "shard.strategy: each rank would send the whole model"),
        ({"run.reproducible": "any_world"}, "run.reproducible: any_world cannot hold"),
        ({"offload.optimizer": "cpu"}, "offload.optimizer: the optimizer would not see"),
        ({"replicas.coordinator": "", "replicas.wire": "int8"}, "replicas.wire: has no effect"),
    ],
)
def test_what_it_does_not_go_with(
    keys: dict[str, Any], said: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    given = {"run.dir": tmp_path / "run", "replicas.coordinator": "127.0.0.1:9"} | keys
    words = [f"--{key}={value}" for key, value in given.items()]
    code, shown = main(["train", "--nproc", "2", *words]), capfd.readouterr().err
    assert code == 2 and said in shown and len(shown.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--dir"),
        (["--dir=x", "--steps=0"], "expected a whole number from 1"),
        (["--dir=x", "--momentum=1"], "--momentum: 1 is not below 1"),
        (["--dir=x", "--host=192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--dir=x", "--stpes=3"], "did you mean --steps?"),
    ],
)
def test_mistakes_of_the_coordinator(
    words: list[str], said: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["replicas", *words]) == 2
    shown = capsys.readouterr().err
    assert said in shown and len(shown.splitlines()) == 1


class Processes:
    """A coordinator and jobs, each with a log; all are ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []
        self.text = text_file(folder)
        self.port = 0

    def coordinator(self, *words: str) -> subprocess.Popen:
        keys = ("--dir", str(self.folder / "outer"), "--port", str(self.port), *words)
        process = self._start("coordinator", "replicas", *keys)
        self.port = int(self.wait_for("coordinator", r"at 127\.0\.0\.1:(\d+)")[-1])
        return process

    def job(self, name: str, seed: int, **keys: Any) -> subprocess.Popen:
        values: dict[str, Any] = TINY | {
            "data.source": self.text, "run.dir": self.folder / name, "run.device": "cpu",
            "run.seed": seed, "run.threads": 1, "log.trackers": "none", "log.every": 1,
            "train.eval_every": 0, "train.global_batch": 4, "train.micro_batch": 2,
            "replicas.coordinator": f"127.0.0.1:{self.port}", "replicas.name": name,
        }  # fmt: skip
        values = {k: v for k, v in values.items() if k != "train.eval_samples"}
        values |= {key.replace("__", "."): value for key, value in keys.items()}
        return self._start(name, "train", *(f"--{k}={v}" for k, v in values.items()))

    def _start(self, name: str, *words: str) -> subprocess.Popen:
        with self._log(name).open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "shardwise.cli", *words],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait_for(self, name: str, pattern: str, num: int = 1, since: int = 0) -> list[str]:
        """`num` finds in a log, behind so many characters of it."""
        end = time.monotonic() + 60
        while len(found := re.findall(pattern, self.log_of(name)[since:])) < num:
            assert time.monotonic() < end, f"{name}: no {pattern}\n{self.log_of(name)}"
            time.sleep(0.02)
        return found

    def log_of(self, name: str) -> str:
        return self._log(name).read_text()

    def rows(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    for process in made.started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # launchers take their ranks along
        process.wait()


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return [int(word) for word in children.read_text().split()]


@pytest.mark.long
def test_one_is_killed_and_the_other_goes_on(processes: Processes) -> None:
    """Real processes; the killed one comes back with the weights of the other."""
    coordinator = processes.coordinator("--replicas", "2", "--steps", "4")
    keys = {"train__steps": 100_000, "checkpoint__every": 4, "nproc": 1}
    a, b = processes.job("a", 1, **keys), processes.job("b", 2, **keys)
    processes.wait_for("coordinator", r"round \d+: a, b\n", 3)
    os.kill(ranks_of(b)[0], signal.SIGKILL)
    assert b.wait(30) == 1
    processes.wait_for("coordinator", r"replica b is gone")
    processes.wait_for("coordinator", r"round \d+: a\n", 3)
    now = len(processes.log_of("coordinator"))
    b = processes.job("b", 2, **keys)
    processes.wait_for("coordinator", r"round \d+: a, b\n", 3, now)
    for process in (b, a):
        process.send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in (a, b)] == [0, 0]
    assert coordinator.wait(30) == 0
    steps = [row["step"] for row in processes.rows("a")]
    assert steps == list(range(1, len(steps) + 1)), "no step of a is lost, or taken twice"
    rounds = [row["round"] for row in processes.rows("a") if "round" in row]
    assert rounds == list(range(1, len(rounds) + 1))
    counts = {row["replicas"] for row in processes.rows("a") if "replicas" in row}
    assert counts == {1, 2}
    assert re.search(r"one of 2 replicas \(b\) in round \d+", processes.log_of("b"))


@pytest.mark.long
def test_a_lost_coordinator_ends_the_jobs_and_they_go_on_with_the_next(
    processes: Processes,
) -> None:
    coordinator = processes.coordinator("--replicas", "1", "--steps", "4")
    keys = {"train__steps": 100_000, "checkpoint__every": 4, "nproc": 2}
    a = processes.job("a", 1, **keys)
    processes.wait_for("coordinator", r"round \d+: a\n", 3)
    coordinator.kill()
    assert a.wait(60) == 1
    said = processes.log_of("a")
    assert said.count("is lost") == 1 and "with the same --dir again" in said
    assert "Traceback" not in said
    coordinator.wait()
    processes.coordinator("--replicas", "1", "--steps", "4")
    now = len(processes.log_of("coordinator"))
    a = processes.job("a", 1, **keys)
    processes.wait_for("coordinator", r"goes on at round \d+", 1, now)
    processes.wait_for("coordinator", r"round \d+: a\n", 3, now)
    a.send_signal(signal.SIGTERM)
    assert a.wait(60) == 0
    rounds = [row["round"] for row in processes.rows("a") if "round" in row]
    assert rounds == sorted(set(rounds))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_twenty_kills(processes: Processes) -> None:
    """At random moments of starts, steps, meetings and saves; no step of the other is lost."""
    choose = random.Random(20261201)
    processes.coordinator("--replicas", "2", "--steps", "3")
    keys = {"train__steps": 1_000_000, "checkpoint__every": 3, "log__every": 100}
    a, b = processes.job("a", 1, **keys), processes.job("b", 2, **keys)
    now = 0
    for number in range(NUM_KILLS):
        if number % 4 != 1:  # the others die while they start
            processes.wait_for("coordinator", r"round \d+: a, b\n", 1, now)
        time.sleep(choose.uniform(0, 3))
        with contextlib.suppress(ProcessLookupError):  # its launcher, where no rank is there yet
            os.kill(choose.choice(ranks_of(b) or [b.pid]), signal.SIGKILL)
        b.wait(60)
        now = len(processes.log_of("coordinator"))
        processes.wait_for("coordinator", r"round \d+: a\n", 2, now)  # a goes on alone
        b = processes.job("b", 2, **keys)
    processes.wait_for("coordinator", r"round \d+: a, b\n", 1, now)
    a.send_signal(signal.SIGTERM)
    assert a.wait(60) == 0
    steps = [row["step"] for row in processes.rows("a")]
    assert steps == list(range(1, len(steps) + 1))
    rounds = [row["round"] for row in processes.rows("a") if "round" in row]
    assert rounds == list(range(1, len(rounds) + 1))
    # Its newest checkpoint, and the outer state, are whole.
    for folder in (processes.folder / "a" / "checkpoints", processes.folder / "outer"):
        newest = max(folder.glob("step_*"))
        assert main(["checkpoint", "verify", str(newest)]) == 0
