"""Build the simulated device from csrc/: g++ and ninja, about a minute on one core, once.

    python -m simulated_device            (in tests/; `make simulated-device` calls it)

The result goes to build/simulated_device/ of the repository, which git ignores, or to the folder
that SIMULATED_DEVICE_DIR names. Its file name holds a hash of the sources, torch's version and the
compiler's: another one of these is another file, the same is built once, by one process at a time.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

NAME = "simulated_device_native"
SOURCES = Path(__file__).resolve().parent / "csrc"
FLAGS = ("-O1", "-std=c++20", "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED")


def why_not() -> str | None:
    """What this machine lacks for the device, in words; None where it can be had."""
    if not sys.platform.startswith("linux"):
        return f"the simulated device is for Linux (memfd, PROT_NONE), this is {sys.platform}"
    if built_path().exists():
        return None
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if missing:
        return f"building the simulated device takes {' and '.join(missing)}, not found in PATH"
    return None


def folder() -> Path:
    """Where it is built."""
    named = os.environ.get("SIMULATED_DEVICE_DIR")
    repository = Path(__file__).resolve().parents[2]
    return Path(named) if named else repository / "build" / "simulated_device"


@functools.cache
def built_path() -> Path:
    """The library of these sources for this torch, Python and compiler."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(" ".join((torch.__version__, sys.version, _compiler(), *FLAGS)).encode())
    return folder() / f"{NAME}-{digest.hexdigest()[:16]}.so"


def _compiler() -> str:
    path = shutil.which("g++")
    if path is None:
        return ""
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout


def build() -> Path:
    """Build it unless that was done; other processes that ask meanwhile wait."""
    path = built_path()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path)
    return path


def _compile(path: Path) -> None:
    objects = path.parent / "objects"
    objects.mkdir(exist_ok=True)
    # Left by a process that was killed; we hold a lock of our own.
    (objects / "lock").unlink(missing_ok=True)
    # In a process of its own, since torch loads what it has built.
    command = [sys.executable, __file__, str(objects)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated device could not be built:\n{done.stdout}{done.stderr}")
    unfinished = path.with_suffix(f".{os.getpid()}")
    shutil.copy2(objects / f"{NAME}.so", unfinished)
    unfinished.rename(path)


def native() -> ModuleType:
    """The library as a Python module; loading it makes torch know the device."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, build())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[NAME]


def _run_ninja(objects: str) -> None:
    from torch.utils import cpp_extension

    cpp_extension.load(
        name=NAME,
        sources=[str(source) for source in sorted(SOURCES.glob("*.cpp"))],
        build_directory=objects,
        extra_cflags=list(FLAGS),
        is_python_module=False,
    )


if __name__ == "__main__":
    _run_ninja(sys.argv[1])
