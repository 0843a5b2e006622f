"""Warm pages: on by default on CPU with glibc, off by its variable and beside the user's own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROBE = """
import torch
from shardwise.engine.services.warm_pages import keep_pages_warm
print(keep_pages_warm(torch.device("meta")), keep_pages_warm(torch.device("cpu")))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's malloc")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "False True"),
        ({"SHARDWISE_WARM_PAGES": "0"}, "False False"),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, "False False"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, "False False"),
    ],
)
def test_raised_unless_told_otherwise(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SHARDWISE_WARM_PAGES", "GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == expected
