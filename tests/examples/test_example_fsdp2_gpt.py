"""examples/fsdp2_gpt.py, a script that knows torch's FSDP2 only, with and without `install()`.

With 2 ranks every sum over ranks has one order, and both engines add up micro-batches before: the
losses are bit-equal, through a checkpoint too. So are the norms but for their last places, where
the ranks' squares are added.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = "examples/fsdp2_gpt.py"


def run(*arguments: str, install: bool) -> tuple[str, dict[int, tuple[float, float]]]:
    """The engine's name, and loss and norm of each step."""
    program = ["-m", "shardwise.install", SCRIPT] if install else [SCRIPT]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, *program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(r"^step (\d+) loss (\S+) norm (\S+)$", done.stdout, re.MULTILINE)
    engine = re.search(r"^engine (\w+) ", done.stdout, re.MULTILINE)
    assert engine is not None
    return engine[1], {int(step): (float(loss), float(norm)) for step, loss, norm in steps}


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_same_losses_and_a_resume(tmp_path: Path) -> None:
    engine, theirs = run("--steps", "6", install=False)
    assert engine == "torch" and list(theirs) == [1, 2, 3, 4, 5, 6]
    folder = ("--checkpoint", str(tmp_path / "checkpoint"))
    engine, first = run("--steps", "3", *folder, install=True)
    assert engine == "shardwise" and list(first) == [1, 2, 3]
    _, rest = run("--steps", "6", *folder, install=True)  # saved, loaded, gone on
    assert list(rest) == [4, 5, 6]
    ours = {**first, **rest}
    for step, (loss, norm) in theirs.items():
        assert ours[step][1] == pytest.approx(norm, rel=1e-6), step
        assert ours[step][0] == loss, step
    assert theirs[6][0] < theirs[1][0]
