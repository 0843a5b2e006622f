"""Ranks that are killed or hang: the job goes on from its last checkpoint, on those that are left,
and ends with the numbers of an uninterrupted run."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from shardwise.errors import ConfigError
from shardwise.train.config_file import load_config
from shardwise.train.restarts import Failure, Restarts
from shardwise.train.worker import _all_are_there

SHARDWISE = [sys.executable, "-m", "shardwise.cli", "train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LIMIT_S = 240.0  # for a loaded machine, not an expectation
pytestmark = pytest.mark.timeout(2 * LIMIT_S)

# A model whose rank 1 gets a signal in its n-th forward, the first time that it runs.
MODEL = """
import os, signal
from pathlib import Path
from torch import nn

class Model(nn.Module):
    def __init__(self, number, at):
        super().__init__()
        self.table, self.out = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.number, self.at, self.calls = number, at, 0

    def forward(self, batch):
        self.calls += 1
        if self.number and self.calls == self.at and os.environ["RANK"] == "1":
            if not Path("struck").exists():
                Path("struck").write_text("once")
                os.kill(os.getpid(), self.number)
        logits = self.out(self.table(batch[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

def build(options):
    return Model(options["number"], options["at"])
"""
JOB = """
[run]
device = "cpu"
reproducible = "any_world"
[model]
kind = "striking:build"
number = {number}
at = {at}
[data]
source = "text.txt"
seq_len = 16
[train]
steps = 9
global_batch = 4
micro_batch = 1
eval_every = 3
eval_samples = 4
[checkpoint]
every = 2
"""
KEYS = ("step", "loss", "grad_norm", "val_loss")


def run(folder: Path, name: str, number: int, *arguments: str, command: Any = SHARDWISE) -> Any:
    """A job in a folder of its own; (exit code, all that it said, rows without times)."""
    where = folder / name
    where.mkdir()
    (where / "text.txt").write_text("one two three four five six seven " * 200)
    (where / "striking.py").write_text(MODEL)
    # Two micro-batches a step and rank and, in every third step, two evaluations: the 13th forward
    # lies in step 6, two steps after a checkpoint.
    (where / "job.toml").write_text(JOB.format(number=int(number), at=13))
    limit_s = "5" if number == signal.SIGSTOP else "100"
    environment = {**os.environ, "XDG_CACHE_HOME": str(where), "SHARDWISE_WAIT_LIMIT_S": limit_s}
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "2"
    environment["SHARDWISE_MEMORY_DIR"] = str(where / "memory")
    done = subprocess.run(
        [*command, "job.toml", "--run.dir=run", *arguments],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    rows = [json.loads(line) for line in (where / "run/metrics.jsonl").read_text().splitlines()]
    numbers = [{key: row[key] for key in KEYS if key in row} for row in rows]
    return done.returncode, done.stderr + done.stdout, numbers


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The rows of a run that nothing interrupts."""
    code, err, rows = run(tmp_path_factory.mktemp("whole"), "whole", 0, "--nproc=1")
    assert code == 0, err
    assert [row["step"] for row in rows] == list(range(1, 10))
    return rows


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "restart 1 of 2 on 2 ranks, from"),
        (["--min-ranks=1"], "restart 1 of 2 on 1 rank instead of 2, from"),
    ],
)
def test_a_killed_rank_is_an_interruption_that_no_number_shows(
    tmp_path: Path, expected: Any, options: list[str], said: str
) -> None:
    code, err, rows = run(
        tmp_path, "job", signal.SIGKILL, "--nproc=2", "--max-restarts=2", *options
    )
    assert code == 0, err
    assert f"rank 1 failed (killed by SIGKILL); {said} the last checkpoint" in err
    assert (tmp_path / "job/struck").exists()
    assert rows == expected  # no gap, no step twice, to the last bit


def test_a_hung_rank_is_found_and_left_out(tmp_path: Path, expected: Any) -> None:
    arguments = ["--nproc=2", "--max-restarts=1", "--min-ranks=1"]
    code, err, rows = run(tmp_path, "job", signal.SIGSTOP, *arguments)
    assert code == 0, err
    assert "rank 1 failed (killed by SIGKILL); restart 1 of 1 on 1 rank instead of 2" in err
    assert rows == expected


def test_torchrun_restarts_it_too(tmp_path: Path, expected: Any) -> None:
    command = [*TORCHRUN, "--nproc-per-node=2", "--max-restarts=1", "-m", "shardwise.train"]
    code, err, rows = run(tmp_path, "job", signal.SIGKILL, command=command)
    assert code == 0, err
    assert (tmp_path / "job/struck").exists()
    assert rows == expected


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (SHARDWISE, ["--nproc=2", "--max-restarts=1", "--min-ranks=1"]),
        ([*TORCHRUN, "--nproc-per-node=2", "--max-restarts=1", "-m", "shardwise.train"], []),
    ],
)
def test_a_killed_rank_loses_no_step_that_memory_has(
    tmp_path: Path, expected: Any, command: Any, options: list[str]
) -> None:
    copies = ["--checkpoint.every=0", "--checkpoint.memory_every=1"]
    code, said, rows = run(tmp_path, "job", signal.SIGKILL, *options, *copies, command=command)
    assert code == 0, said
    assert f"continuing from memory at step 5: {tmp_path}/job/memory/" in said
    if command is SHARDWISE:
        assert "on 1 rank instead of 2, from the last checkpoint or copy in memory" in said
    assert rows == expected
    assert list((tmp_path / "job/memory").iterdir()) == []


def test_which_rank_was_the_cause() -> None:
    """Exit codes in the order in which the ranks ended."""
    killed = Failure.of({0: 3, 2: -9, 1: -15})
    assert (killed.rank, killed.num_lost, killed.is_final) == (2, 1, False)
    assert str(killed) == "rank 2 failed (killed by SIGKILL)"
    raised = Failure.of({0: 3, 1: 1})
    assert (raised.rank, raised.num_lost, raised.is_final) == (1, 0, False)
    assert Failure.of({0: 4, 1: 4}).is_final  # a loss that is no number: on every start
    assert Failure.of({0: 2, 1: 3}).is_final
    assert Failure.of({0: 3, 1: 3}).rank == 0


def test_how_many_ranks_go_on() -> None:
    loaded = load_config(None, [("train.global_batch", "12"), ("train.micro_batch", "1")])
    assert Restarts(3).next_ranks(loaded, 6, 2) == 6
    assert Restarts(3, min_ranks=1).next_ranks(loaded, 6, 0) == 6
    assert Restarts(3, min_ranks=1).next_ranks(loaded, 6, 2) == 4
    assert Restarts(3, min_ranks=1).next_ranks(loaded, 6, 1) == 4  # 5 do not divide the batch
    assert Restarts(3, min_ranks=5).next_ranks(loaded, 6, 1) == 6  # nor is there another
    assert Restarts(3, min_ranks=2).next_ranks(loaded, 6, 6) == 2
    # A micro-batch that was left out fits any ranks; the batch of a run does not change.
    defaults = load_config(None)
    assert Restarts(3, min_ranks=1).next_ranks(defaults, 8, 1) == 4
    assert Restarts(3, min_ranks=1).next_ranks(defaults, 8, 4) == 4


def test_what_cannot_be_meant_is_refused() -> None:
    config = load_config(None).config
    same = load_config(None, [("run.reproducible", "same_world")]).config
    with pytest.raises(ConfigError, match="no effect without --max-restarts"):
        Restarts(0, min_ranks=1).check(config, 2)
    with pytest.raises(ConfigError, match="3 is above the 2 ranks"):
        Restarts(1, min_ranks=3).check(config, 2)
    with pytest.raises(ConfigError, match="same_world needs the same ranks"):
        Restarts(1, min_ranks=1).check(same, 2)
    Restarts(1, min_ranks=2).check(same, 2)


def test_a_rank_that_had_to_be_killed_is_lost_only_where_it_is_the_cause() -> None:
    hung = Failure.of({0: 3, 1: -9}, killed={1})
    assert (hung.rank, hung.num_lost) == (1, 1)
    slow = Failure.of({2: -9, 0: -9, 1: -9}, killed={0, 1})
    assert (slow.rank, slow.num_lost) == (2, 1)
    raised = Failure.of({2: 1, 0: -9}, killed={0})
    assert (raised.rank, raised.num_lost) == (2, 0)


def test_limits_and_folders_are_told_as_what_they_are() -> None:
    from shardwise.train.limits import explain

    assert "ulimit -n is" in explain(OSError(errno.EMFILE, "Too many open files"))
    assert "permission" in explain(PermissionError(errno.EACCES, "Permission denied"))
    assert "too little space" in explain(OSError(errno.ENOSPC, "No space left on device"))
    assert explain(ValueError("mine")) == ""
    wrapped = RuntimeError("could not be written")
    wrapped.__cause__ = OSError(errno.EROFS, "Read-only file system")
    assert "read-only" in explain(wrapped)
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        assert explain(MemoryError()) == ""  # nothing was limited: memory is short, it may pass
    mistake = ConfigError("run.dir: cannot be made")
    mistake.__context__ = PermissionError(errno.EACCES, "Permission denied")
    assert explain(mistake) == ""  # it says itself what is wrong


def test_a_limit_on_files_is_not_retried(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three four five six seven " * 200)
    sizes = ["--model.dim=16", "--model.layers=1", "--model.heads=2", "--data.seq_len=16"]
    options = ["--data.source=text.txt", "--run.device=cpu", "--train.eval_every=0", "--nproc=2"]
    done = subprocess.run(
        [*SHARDWISE, *sizes, *options, "--max-restarts=2", "--run.dir=run"],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20480, 20480)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "the size of a file is limited here (ulimit -f is 20)" in done.stderr
    assert "another rank has failed" not in done.stderr
    assert "restart 1" not in done.stderr


@pytest.mark.parametrize("stopped_by", ["", "SIGTERM"])
def test_ranks_meet_or_leave_together(stopped_by: str) -> None:
    store = HashStore()
    stop: Any = SimpleNamespace(by=stopped_by)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(_all_are_there, store, 0, 2, stop)
        if stopped_by:
            assert not first.result(LIMIT_S)
        assert _all_are_there(store, 1, 2, stop) is not bool(stopped_by)
        assert first.result(LIMIT_S) is not bool(stopped_by)
