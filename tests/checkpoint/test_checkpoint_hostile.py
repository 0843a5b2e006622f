"""Whatever a file says: bounded time and memory, one line, exit code 2."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from checkpoint_kit import one_of_each_kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import shardwise as sw
from search import TIMES
from shardwise.checkpoint.boxes import Box, tiling_problem
from shardwise.checkpoint.importing import open_source
from shardwise.cli.checkpoint import main
from shardwise.errors import CheckpointError

SLACK_MIB = 64


# -- what is asked of every input ----------------------------------------------------------------
def answer(*words: Any) -> tuple[int, str]:
    """Exit code and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(w) for w in words])
    return code, err.getvalue()


def peak_of(path: Path, target: Path) -> tuple[int, str, int]:
    """The same for an import, with the MiB that it took at most, from a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            Path("/proc/self/clear_refs").write_text("5")
            before = _high_water()
            code, err = answer("import", path, target)
            text = json.dumps([code, err, (_high_water() - before) // 1024])
        except BaseException as error:
            text = json.dumps([-1, repr(error), 0])
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        code, err, peak = json.loads(pipe.read())
    os.waitpid(child, 0)
    return code, err, peak


def _high_water() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


# -- inputs that ask for much --------------------------------------------------------------------
def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def with_pickle(content: bytes, kind: int = zipfile.ZIP_STORED) -> bytes:
    """A torch.save file with another pickle in it."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved({"w": torch.ones(4)}))) as good,
        zipfile.ZipFile(buffer, "w", kind) as bad,
    ):
        for name in good.namelist():
            bad.writestr(name, content if name.endswith("data.pkl") else good.read(name))
    return buffer.getvalue()


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def entry(shape: str, end: int) -> bytes:
    return f'{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,{end}]}}}}'.encode()


def nested(depth: int) -> Any:
    value: Any = {"w": torch.ones(2)}
    for _ in range(depth):
        value = {"a": value, "b": value}
    return value


def in_itself() -> Any:
    held: list[Any] = []
    held.append(held)
    return {"w": torch.ones(1), "held": held}


LEGACY = saved({"w": torch.ones(4)}, _use_new_zipfile_serialization=False)
FILES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "null": ("x.safetensors", lambda: safetensors(b"null")),
    "deep": ("x.safetensors", lambda: safetensors(b"[" * 500_000 + b"]" * 500_000)),
    "many lists": ("x.safetensors", lambda: safetensors(b"[" + b"[]," * 5_000_000 + b"[]]")),
    "large": ("x.safetensors", lambda: safetensors(b'{"a":"' + b"x" * 2 * 10**7 + b'"}')),
    "negative": ("x.safetensors", lambda: safetensors(entry("[-1]", 4), b"1234")),
    "digits": ("x.safetensors", lambda: safetensors(entry("[" + "9" * 4000 + "]", 4), b"1234")),
    "dims": ("x.safetensors", lambda: safetensors(entry(str([1] * 5000), 4), b"1234")),
    "too large to hold": ("x.safetensors", lambda: safetensors(entry(f"[{2**62},0,8]", 0))),
    "surrogate": (
        "x.safetensors",
        lambda: safetensors(entry("[1]", 4).replace(b'"a"', b'"\\ud800"'), b"1234"),
    ),
    "memo index": ("x/.metadata", lambda: b"Nr\xff\xff\xff\x7f."),
    "memo index of a file": ("x.pt", lambda: with_pickle(b"\x80\x02Nr\xff\xff\xff\x7f.")),
    "a million lists": ("x/.metadata", lambda: b"\x80\x04(" + b"]" * 900_000 + b"l."),
    "lists in lists": ("x/.metadata", lambda: b"(" * 900_000 + b"l" * 900_000 + b"."),
    "a long string": ("x/.metadata", lambda: b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"."),
    "a long array": ("x/.metadata", lambda: b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b"."),
    "a key of tuples": ("x/.metadata", lambda: b"\x80\x04})" + b"2\x86" * 60 + b"Ns."),
    "bytearray": (
        "x.pt",
        lambda: with_pickle(b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."),
    ),
    "a constructor": (
        "x.pt",
        lambda: with_pickle(b"\x80\x02ctorch\nTensor\nJ\xff\xff\xff\x7f\x85R."),
    ),
    "compressed": ("x.pt", lambda: with_pickle(bytes(2**27), zipfile.ZIP_DEFLATED)),
    "a legacy size": (
        "x.pt",
        lambda: LEGACY.replace(b"K\x04Nt", b"\x8a\x06" + (10**12).to_bytes(6, "little") + b"Nt"),
    ),
    "a legacy storage": ("x.pt", lambda: LEGACY[:-24] + bytes([255] * 5 + [0] * 3) + LEGACY[-16:]),
    "no stride": ("x.pt", lambda: saved({"w": torch.ones(1).expand(10**5, 10**5)})),
    "the same 2**30 times": ("x.pt", lambda: saved(nested(30))),
    "in itself": ("x.pt", lambda: saved(in_itself())),
    "no metadata": ("x/.metadata", lambda: pickle.dumps({})),
    "nothing": ("x.pt", lambda: b""),
}


@pytest.mark.parametrize("name", FILES)
def test_asking_for_much_gets_little(name: str, tmp_path: Path) -> None:
    file, content = FILES[name]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content())
    source = path.parent if path.name == ".metadata" else path
    code, err, peak = peak_of(source, tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("shardwise checkpoint: ")
    assert peak <= 2 * path.stat().st_size / 2**20 + SLACK_MIB


def dcp_of(path: Path, shape: tuple[int, ...], parts: list[tuple[int, ...]], item: bytes) -> None:
    """Parts of one row and column each, all in one place."""
    one = torch.Size([1] * len(shape)) if len(parts) > 1 else torch.Size(shape)
    chunks = [ChunkStorageMetadata(torch.Size(p), one) for p in parts]
    info = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)
    place = _StorageInfo("__0_0.distcp", 0, len(item))
    where = {MetadataIndex("w", torch.Size(p)): place for p in parts}
    path.mkdir()
    (path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": info}, {"w": ("w",)}, where)))
    (path / "__0_0.distcp").write_bytes(item)


def test_a_grid_of_parts_is_checked_in_time(tmp_path: Path) -> None:
    many = [Box((i, j), (1, 1)) for i in range(120) for j in range(120)]
    assert not tiling_problem((120, 120), many)
    grid = [(i, j) for i in range(20) for j in range(20)]
    dcp_of(tmp_path / "grid", (20, 20), grid, saved(torch.ones(1, 1)))
    code, err, peak = peak_of(tmp_path / "grid", tmp_path / "out")
    assert code == 0, err
    assert peak <= SLACK_MIB
    dcp_of(tmp_path / "twice", (20, 20), [*grid[2:], (7, 7), (8, 8)], saved(torch.ones(1, 1)))
    assert "overlap" in peak_of(tmp_path / "twice", tmp_path / "no")[1]
    dcp_of(tmp_path / "large", (2**20, 2**14), [(0, 0)], saved(torch.ones(1, 1)))
    assert "bytes of tensors" in peak_of(tmp_path / "large", tmp_path / "no")[1]


@given(st.data())
@settings(max_examples=60 * TIMES, deadline=None)
def test_parts_that_tile_are_those_that_cover_once(data: Any) -> None:
    """Against counting, on boxes that tile and on the same after a change."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    boxes = [Box.whole(shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, box.size[dim]))
        low = (*box.size[:dim], at, *box.size[dim + 1 :])
        high = (*box.size[:dim], box.size[dim] - at, *box.size[dim + 1 :])
        start = (*box.start[:dim], box.start[dim] + at, *box.start[dim + 1 :])
        boxes += [Box(box.start, low), Box(start, high)]
    if data.draw(st.booleans()):
        box = boxes.pop()
        room = [n - s for n, s in zip(shape, box.size, strict=True)]
        boxes.append(Box(tuple(data.draw(st.integers(0, n)) for n in room), box.size))
    covered = torch.zeros(shape)
    for box in boxes:
        covered[box.slices_in(Box.whole(shape))] += 1
    assert (tiling_problem(shape, boxes) == "") == bool((covered == 1).all())


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    os.mkfifo(tmp_path / "x.pt")
    paths = [tmp_path / "x.safetensors", tmp_path / "x.pt", Path("/dev/zero")]
    for name in (".metadata", "manifest.json", "model.safetensors", "latest", "pytorch_model.bin"):
        for kind, make in (
            ("fifo", os.mkfifo),
            ("folder", os.mkdir),
            ("device", lambda p: os.symlink("/dev/zero", p)),
        ):
            (tmp_path / kind / name).mkdir(parents=True)
            make(tmp_path / kind / name / name)
            paths.append(tmp_path / kind / name)
    for tag in (".", "..", "../x", "", "\0", "x" * 300):
        folder = tmp_path / f"tag{len(paths)}"
        folder.mkdir()
        (folder / "latest").write_text(tag)
        paths.append(folder)
    for path in paths:
        for command in ("ls", "verify"):
            code, err = answer(command, path)
            assert code == (2 if command == "ls" else 1), (path, err)
            assert err.count("\n") <= 1


# -- two names that become one -------------------------------------------------------------------
def test_names_that_collide_are_named(tmp_path: Path) -> None:
    one, two = torch.ones(2), torch.zeros(2)
    moments = {"state": {"a.w": {"m": one}}, "param_groups": []}
    for value in (
        {"a": {"b": one}, "a.b": two},
        {"a": {"b": {"c": one}}, "a.b": {"c": two}},
        {"a": {"b": one}, "a.b": 5},
        {1: one, "1": two},
        {"model": {"w": one}, "state_dict": {"w": two}},
        {"model": {"w": one}, "ema": {"model": {"w": two}}},
        {"w": one, "optimizer": moments, "optim": moments},
        {"optimizer": {"state": {"a": {"w": {"m": one}}, "a.w": {"m": two}}, "param_groups": []}},
    ):
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises(CheckpointError, match="would both become"):
            open_source(tmp_path / "x.pt")
    dcp.save({"a": {"b": one}, "other": two}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    file = tmp_path / "dcp" / ".metadata"  # torch itself does not write such a one
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data["other"] = ("a.b",)
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="would both become"):
        open_source(tmp_path / "dcp")
    for number in (1, 2):
        (tmp_path / "bins").mkdir(exist_ok=True)
        torch.save({"w": one * number}, tmp_path / "bins" / f"pytorch_model-{number}.bin")
    with pytest.raises(CheckpointError, match="stands in two files"):
        open_source(tmp_path / "bins")
    with pytest.raises(CheckpointError, match="would both become"):
        sw.load_full_state_dict(nn.Linear(1, 1), {1: one, "1": two})  # type: ignore[dict-item]


# -- damage at random ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each kind."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return one_of_each_kind(tmp_path_factory.mktemp("originals"), model)


@pytest.fixture
def inputs(originals: Path, tmp_path: Path) -> Iterator[Any]:
    def damaged(kind: str, number: int, change: Callable[[bytes], bytes]) -> Path:
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.copytree(originals / kind, tmp_path / "in")
        files = sorted(p for p in (tmp_path / "in").rglob("*") if p.is_file())
        file = files[number % len(files)]
        file.write_bytes(change(file.read_bytes()))
        return file if kind in ("zip", "legacy") else tmp_path / "in"

    return damaged


KINDS = ("zip", "legacy", "bins", "safetensors", "dcp", "ours", "deepspeed")
NUMBERS = [b"-1", b"0", b"99999999999999999999", b"[]", b"{}", b"null", b'"x"', b"1e999"]
OPERATIONS = [b"N", b"]", b"}", b")", b"0", b"2", b"K\xff", b"J\xff\xff\xff\xff", b"R", b"b", b"."]


@st.composite
def changes(draw: Any) -> Callable[[bytes], bytes]:
    """Bits, cuts, doubled parts, other numbers and operations."""
    places = draw(st.lists(st.floats(0, 1), min_size=1, max_size=4))
    what = draw(st.sampled_from(["flip", "cut", "double", "number", "operation", "fill"]))
    piece = draw(st.sampled_from(NUMBERS if what == "number" else OPERATIONS))
    bit = draw(st.integers(0, 7))

    def change(content: bytes) -> bytes:
        for place in places:
            at = int(place * max(0, len(content) - 1))
            if what == "cut":
                content = content[:at]
            elif what == "double":
                content = content[:at] + content[at // 2 :]
            elif what == "flip" and content:
                content = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
            elif what == "fill":
                content = content[:at] + b"\xff" * len(content[at : at + 9]) + content[at + 9 :]
            else:
                content = content[:at] + piece + content[at + len(piece) :]
        return content

    return change


@pytest.mark.parametrize("kind", KINDS)
@given(number=st.integers(0, 9), change=changes())
@settings(
    max_examples=60 * TIMES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_damage_is_one_line(
    inputs: Any, tmp_path: Path, kind: str, number: int, change: Callable[[bytes], bytes]
) -> None:
    path = inputs(kind, number, change)
    code, err = answer("import", path, tmp_path / "out")
    assert (code, err.count("\n")) in ((0, 0), (2, 1)), err
