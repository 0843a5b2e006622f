"""`examples/launch/`, as far as one machine goes: the Slurm and SkyPilot scripts run two "nodes" of
one rank each, are asked to stop, and go on; the Kubeflow manifest is one by Kubeflow's own models.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.train.restarts import EXIT_REQUEUE

LAUNCH = Path(__file__).resolve().parents[2] / "examples/launch"
BIN = Path(sys.executable).parent
STEPS = 12

# Two tasks, as two hosts would run them; gives the highest exit code, and passes signals on.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
tasks = [
    subprocess.Popen(command, env={{**os.environ, "SLURM_PROCID": str(i), "SLURM_LOCALID": "0"}})
    for i in range(int(os.environ["SLURM_NTASKS"]))
]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$SCONTROL_LOG"; fi
"""


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """A job that takes long enough to be asked to stop."""
    source = tmp_path / "text.txt"
    source.write_text("All happy families are alike. " * 400)
    values = {
        "run.dir": tmp_path / "run",
        "run.device": "cpu",
        "run.threads": 1,
        "data.source": source,
        "data.seq_len": 32,
        "model.dim": 16,
        "model.layers": 1,
        "model.heads": 2,
        "train.steps": STEPS,
        "train.global_batch": 4,
        "train.micro_batch": 2,
        "train.eval_every": 0,
        "checkpoint.every": 0,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def environment(folder: Path, **more: Any) -> dict[str, str]:
    """Scripts find `shardwise`, and our stand-ins for the scheduler's commands before all else."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tools}:{BIN}:{os.environ['PATH']}",
        "GLOO_SOCKET_IFNAME": "lo",
        "SCONTROL_LOG": str(folder / "scontrol.log"),
        **{key: str(value) for key, value in more.items()},
    }


def steps_of(folder: Path) -> list[int]:
    file = folder / "run/metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def stop_after_a_step(process: subprocess.Popen[str], folder: Path) -> None:
    """Asks a process group's leader to stop once a step was written."""
    end_at = time.monotonic() + 90
    while not steps_of(folder):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_at, "no step was taken"
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)


def slurm(folder: Path, job: list[str], port: int) -> tuple[list[str], dict[str, str]]:
    variables = {
        "SLURM_JOB_ID": 4711,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": 2,
        "SLURM_NNODES": 2,
        "SLURM_CPUS_PER_TASK": 1,
        "MASTER_PORT": port,
    }
    return ["bash", str(LAUNCH / "slurm.sbatch"), *job], environment(folder, **variables)


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_slurm_requeues_what_was_asked_to_stop(tmp_path: Path, job: list[str]) -> None:
    command, variables = slurm(tmp_path, [*job, "--train.steps=100000"], free_port())
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        # Slurm signals the tasks, not the script.
        while not (srun := [pid for pid in children(process.pid) if b"/srun" in command_of(pid)]):
            time.sleep(0.01)
        stop_after_a_step(process_of(srun[0], process), tmp_path)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "requeued" in output
    assert (tmp_path / "scontrol.log").read_text() == "requeue 4711\n"
    reached = steps_of(tmp_path)[-1]
    command, variables = slurm(tmp_path, [*job, f"--train.steps={reached + 3}"], free_port())
    again = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False, timeout=180
    )
    assert again.returncode == 0, again.stderr
    assert f"continuing from {tmp_path}/run/checkpoints/step_{reached:08d}" in again.stdout
    assert steps_of(tmp_path) == list(range(1, reached + 4)), "no step is lost, none is done twice"
    assert (tmp_path / "scontrol.log").read_text().count("requeue") == 1, "a job that is done ends"


def test_slurm_says_what_failed(tmp_path: Path, job: list[str]) -> None:
    command, variables = slurm(tmp_path, [*job, "--train.stepz=3"], free_port())
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert "train.stepz" in done.stderr
    assert not (tmp_path / "scontrol.log").exists(), "a mistake is not tried again"


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def command_of(pid: int) -> bytes:
    """Empty for a process that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def process_of(pid: int, around: subprocess.Popen[str]) -> Any:
    """What `stop_after_a_step` needs of the process `pid`, which another one waits for."""

    class Child:
        poll, communicate = around.poll, around.communicate

        def send_signal(self, number: int) -> None:
            os.kill(pid, number)

    return Child()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_skypilot_runs_two_nodes(tmp_path: Path, job: list[str]) -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    known = {"name", "num_nodes", "resources", "file_mounts", "setup", "run"}
    assert task.keys() <= known
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [EXIT_REQUEUE]
    script = task["run"].replace("/work/job.toml --run.dir=/work/runs/job", '"$@"')
    assert '"$@"' in script
    script = script.replace("MASTER_PORT=29500", f"MASTER_PORT={free_port()}")

    def start(*more: str) -> list[subprocess.Popen[str]]:
        return [
            subprocess.Popen(
                ["bash", "-c", script, "run", *job, *more],
                env=environment(
                    tmp_path,
                    SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.1",
                    SKYPILOT_NUM_NODES=2,
                    SKYPILOT_NUM_GPUS_PER_NODE=1,
                    SKYPILOT_NODE_RANK=node,
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in range(2)
        ]

    nodes = start("--train.steps=100000")
    stop_after_a_step(nodes[0], tmp_path)
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [EXIT_REQUEUE, EXIT_REQUEUE], outputs
    reached = steps_of(tmp_path)[-1]
    nodes = start(f"--train.steps={reached + 2}")
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert steps_of(tmp_path) == list(range(1, reached + 3))


def test_the_launcher_of_one_machine_says_that_steps_are_left(
    tmp_path: Path, job: list[str]
) -> None:
    command = [str(BIN / "shardwise"), "train", *job, "--nproc=1", "--train.steps=100000"]
    with subprocess.Popen([*command, "--requeue"], stdout=subprocess.PIPE, text=True) as process:
        stop_after_a_step(process, tmp_path)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == EXIT_REQUEUE
    assert "stopped by SIGTERM" in output
    reached = steps_of(tmp_path)[-1]
    done = subprocess.run(
        [*command[:-1], f"--train.steps={reached}", "--requeue"],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, "no step is left"


def test_the_kubeflow_manifest_is_one() -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api"
    )
    manifest = yaml.safe_load((LAUNCH / "kubeflow_trainjob.yaml").read_text())
    read = models.TrainerV1alpha1TrainJob.from_dict(manifest)
    assert read is not None
    written = read.to_dict()
    assert lacking(manifest, written) == [], "a name that Kubeflow does not know is dropped"
    assert written["spec"]["trainer"]["numNodes"] == 2
    wrong = {**manifest, "spec": {**manifest["spec"], "trainer": {"numNodez": 2}}}
    read = models.TrainerV1alpha1TrainJob.from_dict(wrong)
    assert lacking(wrong, read.to_dict()) == [".spec.trainer.numNodez"]


def lacking(given: Any, found: Any, at: str = "") -> list[str]:
    """What `found` has lost of `given`."""
    if isinstance(given, dict) and isinstance(found, dict):
        return [
            text
            for key, value in given.items()
            for text in (
                lacking(value, found[key], f"{at}.{key}") if key in found else [f"{at}.{key}"]
            )
        ]
    if isinstance(given, list) and isinstance(found, list) and len(given) == len(found):
        pairs = enumerate(zip(given, found, strict=True))
        return [text for i, (a, b) in pairs for text in lacking(a, b, f"{at}[{i}]")]
    return [] if given == found else [at]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_ray_runs_two_workers(tmp_path: Path, job: list[str]) -> None:
    pytest.importorskip("ray.train", reason='pip install "shardwise[ray]"')
    command = [sys.executable, str(LAUNCH / "ray_train.py"), "--workers=2", *job]
    done = subprocess.run(
        command,
        env=environment(tmp_path, RAY_TRAIN_V2_ENABLED=1),
        capture_output=True, text=True, check=False, timeout=360,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("name", ["slurm.sbatch", "kubeflow_trainjob.yaml", "skypilot.yaml"])
def test_scripts_are_short(name: str) -> None:
    assert len((LAUNCH / name).read_text().splitlines()) <= 60
