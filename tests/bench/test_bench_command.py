"""The command itself, in processes of its own: help, mistakes, a whole run, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cli import main

COMMAND = [sys.executable, "-m", "shardwise.cli", "bench"]
MODULE = """
import torch
from torch import nn
def model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
def batch(index):
    return (torch.randn(4, 8),), {}, lambda out: (out - 1).square().mean()
"""


def test_help_needs_neither_torch_nor_numpy():
    code = (
        "import sys; from shardwise.cli import main; assert main(['bench', '--help']) == 0\n"
        "found = {'torch', 'numpy', 'matplotlib'} & set(sys.modules); assert not found, found"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "shard_grad_op" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--engins", "fsdp2"], "--engins: unknown option; did you mean --engines?"),
        (["--engines", "fsdp3"], "no engine 'fsdp3'; did you mean fsdp"),
        (["--workload", "7B"], "no workload '7B'; there are tiny, 23M"),
        (["--precision", "fp8"], "there are fp32 and bf16, found 'fp8'"),
        (["--rounds", "0"], "--rounds: expected a whole number from 1, found '0'"),
        (["--limit-s", "soon"], "--limit-s: expected a number from 0, found 'soon'"),
        (["--model", "mine:model"], "--batch: needed too"),
        (["--model", "mine", "--batch", "mine:batch"], "expected module:function, found 'mine'"),
        (["none.toml"], "none.toml: no such file"),
        (["none.toml", "--workload", "tiny"], "config and workload: each says what to train"),
        (["--json", "no/such/file.json"], "--json: there is no folder"),
        (["--figure", "result.txt"], "expected a name that ends with .png"),
    ],
)
def test_mistakes(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert shown.err.startswith("shardwise bench: ")
    assert shown.err.count("\n") == 1
    assert not shown.out
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_a_model_of_ones_own(tmp_path: Path):
    """Two engines on real ranks, one of which cannot start; the rest goes on."""
    (tmp_path / "mine_bench.py").write_text(MODULE)
    wrong = "ddp@GLOO_SOCKET_IFNAME=no_such_0"
    done = subprocess.run(
        [
            *COMMAND, "--model", "mine_bench:model", "--batch", "mine_bench:batch", "--rounds", "1",
            "--steps", "2", "--no-memory", "--limit-s", "0", "--json", "result.json",
            "--engines", f"shardwise,{wrong},floor",
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "result.json").read_text())
    (comparison,) = found["comparisons"]
    assert comparison["samples_per_rank"] == 4
    assert comparison["engines"]["shardwise"]["state"] == "ok", done.stderr
    assert comparison["engines"]["shardwise"]["traffic_per_step_and_rank"]["num_gathers"] == 2
    assert comparison["engines"][wrong]["state"] == "failed"
    assert "no_such_0" in comparison["engines"][wrong]["error"]
    assert done.returncode == 1


@pytest.mark.slow
def test_a_users_mistake_on_the_ranks_is_one_line(tmp_path: Path):
    (tmp_path / "mine_wrong.py").write_text(MODULE.replace("def batch(", "def batches("))
    done = subprocess.run(
        [
            *COMMAND, "--model", "mine_wrong:model", "--batch", "mine_wrong:batch",
            "--engines", "floor",
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 2
    assert "has no function 'batch'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(tmp_path: Path):
    process = subprocess.Popen(
        [*COMMAND, "--workload", "tiny", "--engines", "floor", "--rounds", "60000"],
        cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    children: set[int] = set()
    try:
        end_s = time.monotonic() + 60
        while len(children) < 3 and time.monotonic() < end_s:  # two ranks, a resource tracker
            children = _members(process.pid) - {process.pid}
            time.sleep(0.05)
        assert len(children) >= 3
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=40)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1].endswith("interrupted; its ranks have ended")
    assert "Traceback" not in errors
    end_s = time.monotonic() + 10
    while _members(process.pid) and time.monotonic() < end_s:  # the resource tracker
        time.sleep(0.05)
    assert not _members(process.pid)


def _members(session: int) -> set[int]:
    """Living processes of a session."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.add(int(path.parent.name))
    return found
