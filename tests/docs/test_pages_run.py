"""The commands of the pages that newcomers read are typed one after the other, as a reader would.

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
from test_code_blocks import _MODEL, DOCS, ROOT, blocks_of, model_directory

PAGES = ("quickstart.md", "ladder.md", "strategies.md", "choosing.md", "plan.md", "doctor.md")
# No machine has what these need: other hosts, or the figures of a long measurement.
LEFT_OUT = {
    "quickstart.md": ("shardwise data", "shardwise train", "shardwise generate", "shardwise doctor",
                      "shardwise report"),  # a model that has a tokenizer: `make finetune` runs it
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    place = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for folder in ("benchmarks", "examples", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    ran = 0
    for block in blocks_of(DOCS / name):
        if (file := block.remark_of("file")) is not None:
            (tmp_path / file).write_text(block.text)
            if f'path = "{_MODEL}"' in block.text:
                shutil.copytree(model_directory(), tmp_path / _MODEL)
        if block.language != "sh":
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            if not line.startswith("shardwise ") or line.startswith(LEFT_OUT.get(name, ("-",))):
                continue
            done = subprocess.run(
                line, shell=True, cwd=tmp_path, env=place, capture_output=True, text=True,
                timeout=600, check=False,
            )  # fmt: skip
            # A finding, or a plan in which nothing fits, is 1; a mistake is 2.
            assert done.returncode in (0, 1), f"{line}\n{done.stdout}\n{done.stderr}"
            ran += 1
    assert ran
