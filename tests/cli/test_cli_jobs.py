"""Jobs as processes: killed, asked to stop, started by torchrun, with a rank that fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SHARDWISE = [sys.executable, "-m", "shardwise.cli", "train"]
TINY = [
    "--model.dim=16",
    "--model.layers=1",
    "--model.heads=2",
    "--data.seq_len=16",
    "--train.global_batch=4",
    "--train.micro_batch=2",
    "--train.eval_every=0",
    "--run.device=cpu",
]
WAIT_S = 90.0  # a limit for a loaded machine, not an expectation


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Text to train on, and a cache and a working directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("one two three four five six seven " * 200)
    return tmp_path


def start(*arguments, command=SHARDWISE):
    return subprocess.Popen(
        [*command, "--data.source=text.txt", "--run.dir=run", *TINY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """(exit code, stdout, stderr)"""
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def rows():
    try:
        lines = Path("run/metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # being written
    return found


def wait_for_step(process, step):
    deadline = time.monotonic() + WAIT_S
    while not any(row["step"] >= step for row in rows()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks_of(launcher):
    """Process ids of the launcher's ranks."""
    found = []
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for pid in (task / "children").read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"shardwise.train" in command:
                found.append(int(pid))
    return found


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def test_kill_9_of_the_job_ends_its_ranks_and_the_next_start_continues(folder):
    process = start("--train.steps=100000", "--checkpoint.every=5", "--nproc=2")
    wait_for_step(process, 7)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + WAIT_S
    while any(is_alive(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    last = max(int(p.name[5:]) for p in Path("run/checkpoints").glob("step_*"))
    code, out, err = finish(start(f"--train.steps={last + 3}", "--checkpoint.every=5", "--nproc=2"))
    assert code == 0, err
    assert f"continuing from run/checkpoints/step_{last:08d}" in out
    assert [row["step"] for row in rows()] == list(range(1, last + 4))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_saves_and_exits_0(folder, number):
    process = start("--train.steps=100000", "--checkpoint.every=0")
    wait_for_step(process, 3)
    process.send_signal(number)
    code, out, err = finish(process)
    # On a busy machine ranks say that they wait for others to start.
    said = [line for line in err.splitlines() if " has waited " not in line]
    assert (code, said) == (0, [])
    last = rows()[-1]["step"]
    assert f"stopped by {number.name} after step {last}, saved" in out
    assert [p.name for p in Path("run/checkpoints").iterdir()] == [f"step_{last:08d}"]


@pytest.mark.long
def test_torchrun_continues_what_the_launcher_began_and_another_model_is_refused(folder):
    Path("job.toml").write_text("[train]\nsteps = 4\n")
    code, _, err = finish(start("job.toml", "--nproc=1"))
    assert code == 0, err
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command = [*torchrun, "-m", "shardwise.train", "job.toml"]
    code, out, err = finish(start("--train.steps=6", command=command))
    assert code == 0, err
    assert "written by 1 rank, now 2" in out
    assert [row["step"] for row in rows()] == [1, 2, 3, 4, 5, 6]

    before = {p: p.stat().st_mtime_ns for p in Path("run").rglob("*")}
    code, _, err = finish(start("--train.steps=8", "--model.dim=32", "--nproc=1"))
    assert code == 2
    assert err.count("\n") == 1
    assert "is of another model: of another shape: blocks.0." in err
    assert {p: p.stat().st_mtime_ns for p in Path("run").rglob("*")} == before


FAILING = """
import os, signal, torch

class Failing(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how, self.calls = torch.nn.Linear(17, 1), how, 0

    def forward(self, batch):
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == "1":
            if self.how == "raise":
                raise ArithmeticError("my own mistake")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(batch.float()).mean() ** 2

def build(options):
    return Failing(options["how"])
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", ["ArithmeticError: my own mistake", "rank 1 failed (exit code 1)"]),
        ("kill", ["rank 1 failed (killed by SIGKILL)"]),
    ],
)
def test_a_rank_that_fails_ends_the_job(folder, how, expected):
    Path("failing.py").write_text(FAILING)
    Path("job.toml").write_text(f'[model]\nkind = "failing:build"\nhow = "{how}"\n')
    command = [*SHARDWISE, "job.toml", "--data.source=text.txt", "--run.dir=run", "--nproc=2"]
    sizes = ["--data.seq_len=16", "--train.global_batch=4", "--train.micro_batch=2"]
    process = subprocess.Popen(
        [*command, *sizes, "--run.device=cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    code, _, err = finish(process)
    assert code == 1
    for text in expected:
        assert text in err
    assert "There is no checkpoint yet: another start begins at step 0" in err
    assert [row["step"] for row in rows()] == [1, 2]


def test_a_device_that_is_not_there_is_a_mistake_also_when_nothing_is_left_to_do(folder):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    code, _, err = finish(start("--train.steps=1", "--nproc=1"))
    assert code == 0, err
    cuda = ["--train.steps=1", "--nproc=1", "--run.device=cuda"]
    code, out, err = finish(start(*cuda))
    assert (code, out) == (2, "")
    assert err == (
        "shardwise train: --run.device: cuda is asked for, but torch sees no GPU; use auto or cpu\n"
    )


def test_a_port_in_use_under_torchrun_is_one_line(folder, monkeypatch):
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(taken.getsockname()[1]),
        }.items():
            monkeypatch.setenv(name, value)
        command = [sys.executable, "-m", "shardwise.train"]
        code, _, err = finish(start(command=command))
    assert code == 2
    line = err.splitlines()[-1]
    assert "MASTER_PORT" in line
    assert "in use" in line
    assert not os.path.exists("run")


def test_of_two_jobs_in_one_directory_the_second_is_one_line(folder):
    """Started at once, where the directory is not there yet. A kill -9 leaves no lock."""
    long = ("--train.steps=100000", "--checkpoint.every=5", "--nproc=1")
    jobs = [start(*long), start(*long)]
    deadline = time.monotonic() + WAIT_S
    while not (ended := [job for job in jobs if job.poll() is not None]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (second,) = ended
    (first,) = (job for job in jobs if job is not second)
    code, out, err = finish(second)
    assert (code, out.count("\n")) == (2, 0), out
    assert err.count("\n") == 1, err
    assert "run.dir: run is in use by another job (process " in err
    wait_for_step(first, 7)
    assert first.poll() is None
    assert [row["step"] for row in rows()[:7]] == list(range(1, 8))
    first.kill()
    first.communicate()
    last = max(int(p.name[5:]) for p in Path("run/checkpoints").glob("step_*"))
    code, out, err = finish(start(f"--train.steps={last + 3}", "--nproc=1"))
    assert code == 0, err
    assert f"continuing from run/checkpoints/step_{last:08d}" in out
