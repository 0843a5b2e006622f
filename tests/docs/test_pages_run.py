"""The commands of README and docs/ are typed one after the other, page by page, as a reader would.

In `make test-all`; what each command may be is checked in every `make test`
(`test_code_blocks.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_code_blocks import _MODEL, PAGES, ROOT, blocks_of, commands, model_directory

LEFT_OUT = {
    "pip ": "changes the environment; CI's own installation is such a call",
    "make ": "CI runs the targets",
    "srun ": "needs Slurm",
    "kill ": "goes with a process of the reader's",
    "shardwise replicas": "waits for replicas; tests/train/test_train_replicas.py starts them",
    "shardwise bench": "minutes each; tests/benchmarks runs a small one",
    "shardwise train examples/smollm2": "make finetune runs it: the model is fetched",
    "torchrun --nproc-per-node 2 examples/smollm2": "the same",
    "shardwise generate models/smollm2": "the same",
    "shardwise generate runs/finetune": "the same",
    "torchrun --nproc-per-node 8 -m shardwise.install train.py": "a program of the reader's",
}
MAY_END_WITH_1 = ("shardwise doctor", "shardwise plan", "shardwise verify")  # what they found
BLOCKS = {block.page: list(blocks_of(block.page)) for block, _ in commands()}


def is_left_out(line: str) -> bool:
    return line.startswith(tuple(LEFT_OUT))


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", BLOCKS, ids=lambda page: page.name)
def test_a_page_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    for folder in ("benchmarks", "examples", "docs", "README.md"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for path in (_MODEL, "models/smollm2"):
        shutil.copytree(model_directory(), tmp_path / path)
    for block in BLOCKS[page]:
        if (name := block.remark_of("file")) is not None:
            chats = name == "chats.jsonl"  # a page shows their form; a reader has more
            (tmp_path / name).write_text(block.text * 2000 if chats else block.text)
    place = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for block, line in commands():
        if block.page != page or is_left_out(line):
            continue
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=place, capture_output=True, text=True,
            timeout=900, check=False,
        )  # fmt: skip
        allowed = (0, 1) if line.startswith(MAY_END_WITH_1) else (0,)
        assert done.returncode in allowed, f"{line}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def test_what_is_left_out_is_there() -> None:
    lines = [line for _, line in commands()]
    for begin in LEFT_OUT:
        if begin != "kill ":
            assert any(line.startswith(begin) for line in lines), begin
    assert sum(not is_left_out(line) for line in lines) > 40
    assert all(page in PAGES for page in BLOCKS)
