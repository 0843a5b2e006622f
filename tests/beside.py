"""Modules that lie beside the scripts in benchmarks/."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def from_benchmarks(name: str) -> ModuleType:
    """Imports one. That folder does not stay on the path, which ranks get from here: a module
    `engine` lies there, and would hide the folder of that name in tests/.
    """
    with mock.patch.object(sys, "path", [str(BENCHMARKS), *sys.path]):
        return importlib.import_module(name)
