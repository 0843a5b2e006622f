"""Each single value of each kind of checkpoint as something else: one line, never a traceback.

The damage is done to what a file says, not to its bytes: every node of its pickle or JSON in turn
becomes None, a huge number, a list, another name and so on, with all checksums and sizes mended. In
the suite each node takes some of these in turn; SHARDWISE_EXAMPLES=100 gives it all of them.
"""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import json
import os
import pickle
import pickletools
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from checkpoint_kit import one_of_each_kind

from search import TIMES
from shardwise.checkpoint.exporting import export_safetensors
from shardwise.checkpoint.importing import import_checkpoint, open_source
from shardwise.cli.checkpoint import main
from shardwise.errors import CheckpointError

# -- other values --------------------------------------------------------------------------------
TEXTS = ("", "..", "\ud800", "a\nb", "9" * 5000)


def pickled_text(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(content)) + content


AS_PICKLE: dict[str, bytes] = {
    "None": b"N",
    "-1": b"J\xff\xff\xff\xff",
    "2**70": b"\x8a\x09" + (2**70).to_bytes(9, "little"),
    "2**40000": b"\x8b" + struct.pack("<I", 5001) + (2**40000).to_bytes(5001, "little"),
    "nan": b"G" + struct.pack(">d", float("nan")),
    "True": b"\x88",
    "bytes": b"C\x01x",
    "tuple": b")",
    "list": b"]",
    "dict": b"}",
    "nested": b"](](N}eee",
    "pairs": b"}X\x01\x00\x00\x00aK\x01s",
    "dtype": b"ctorch\nfloat16\n",
    "class": b"ctorch\ndevice\n",
    "record": b"ctorch\ndevice\n)R",
    "set": b"cbuiltins\nset\n]\x85R",
    **{repr(t[:4]): pickled_text(t) for t in TEXTS},
}
AS_JSON: list[Any] = [
    *(None, -1, 0, 2**70, 10**400, 1.5, float("nan"), True, [], {}, [[{}]], {"a": 1}),
    *({"$float": []}, {"$tensor": ["F32", [2], [1]]}, {"$tensor": ["I8", [1], [2**70]]}),
    *({"$dict": [[[], 1]]}, {"$tuple": 5}, {"$no": 1}, *TEXTS),
]


# -- every node of a pickle ----------------------------------------------------------------------
def pickles(content: bytes) -> Iterator[bytes]:
    """The pickle with each value that it makes as another one: where an operation has left a value
    on the stack, that is taken off and the other put there."""
    operations = list(pickletools.genops(content))
    ends = [at for _, _, at in operations[1:]] + [len(content)]
    texts = [a for op, a, _ in operations if op.name == "BINUNICODE"]
    for number, ((operation, argument, _), end) in enumerate(zip(operations, ends, strict=True)):
        made = [kind.name for kind in operation.stack_after]
        if not made or made == ["mark"] or "PUT" in operation.name or operation.name in MOVES:
            continue
        others = chosen(list(AS_PICKLE.values()), number)
        if operation.name == "BINUNICODE":  # as the next name: one stands twice, one is lost
            others.append(pickled_text(texts[(texts.index(argument) + 1) % len(texts)]))
        for other in others:
            yield content[:end] + b"0" + other + content[end:]


MOVES = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD")


def chosen(values: list[Any], number: int) -> list[Any]:
    """Some of the values, others for each node."""
    count = min(len(values), 2 * TIMES)
    return [values[(number * count + i) % len(values)] for i in range(count)]


# -- every node of a JSON text -------------------------------------------------------------------
def texts(value: Any) -> Iterator[str]:
    for number, path in enumerate(paths_in(value, ())):
        for other in chosen(AS_JSON, number):
            yield json.dumps(changed(value, path, lambda held, key, v=other: put(held, key, v)))
        if path:
            yield json.dumps(changed(value, path, lambda held, key: held.pop(key)))
        if path and isinstance(path[-1], str):
            twice = changed(value, path, lambda held, key: put(held, f"{key}#", held[key]))
            yield json.dumps(twice).replace(f'{path[-1]}#"', f'{path[-1]}"')
        elif path:
            yield json.dumps(changed(value, path, lambda held, key: held.append(held[key])))


def put(held: Any, key: Any, value: Any) -> None:
    held[key] = value


def paths_in(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield path
    inner: Any = value.items() if isinstance(value, dict) else ()
    for key, held in enumerate(value) if isinstance(value, list) else inner:
        yield from paths_in(held, (*path, key))


def changed(value: Any, path: tuple[Any, ...], change: Callable[..., Any]) -> Any:
    whole = [copy.deepcopy(value)]
    held: Any = whole
    for key in (0, *path[:-1]) if path else ():
        held = held[key]
    change(held, path[-1] if path else 0)
    return whole[0]


# -- files with one changed part -----------------------------------------------------------------
def zips(file: Path) -> Iterator[bytes]:
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (n for n in parts if n.endswith("/data.pkl"))
    for content in pickles(parts[name]):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for other, held in parts.items():
                archive.writestr(other, content if other == name else held)
        yield buffer.getvalue()


def legacies(file: Path) -> Iterator[bytes]:
    """The third and fourth pickles: the value, the keys of its storages."""
    content, ends = file.read_bytes(), [0]
    for _ in range(5):
        for operation, _, at in pickletools.genops(content[ends[-1] :]):
            if operation.name == "STOP":
                ends.append(ends[-1] + at + 1)
    for start, end in itertools.pairwise(ends):
        for changed_part in pickles(content[start:end]):
            yield content[:start] + changed_part + content[end:]


def headers(file: Path) -> Iterator[bytes]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for text in texts(json.loads(content[8 : 8 + length])):
        yield len(text.encode()).to_bytes(8, "little") + text.encode() + content[8 + length :]


def plain(file: Path) -> Iterator[bytes]:
    return (text.encode() for text in texts(json.loads(file.read_bytes())))


def manifest(value: Any) -> bytes:
    rest = json.dumps(value, indent=1).removeprefix("{").lstrip()
    first = f'{{"checksum": "{hashlib.sha256(rest.encode()).hexdigest()}",\n'
    return first.encode() + rest.encode()


def manifests(file: Path) -> Iterator[bytes]:
    value = json.loads(file.read_bytes())
    del value["checksum"]
    for text in texts(value):
        if text.startswith("{"):
            yield manifest(json.loads(text))


def indexes(file: Path) -> Iterator[bytes]:
    """With the size and the checksum that the manifest wants."""
    held = json.loads((file.parent / "manifest.json").read_bytes())
    del held["checksum"]
    for content in plain(file):
        sums = hashlib.sha256(content).hexdigest()[:16]
        held["files"]["index.json"] = {"size_bytes": len(content), "checksums": sums}
        (file.parent / "manifest.json").write_bytes(manifest(held))
        yield content


def metadata(file: Path) -> Iterator[bytes]:
    return pickles(pickle.dumps(pickle.loads(file.read_bytes()), protocol=2))


def items(file: Path) -> Iterator[bytes]:
    """Each part of a tensor as another value, in a file that grows: the metadata says where."""
    content, said = file.read_bytes(), pickle.loads((file.parent / ".metadata").read_bytes())
    for index, info in said.storage_data.items():
        for other in (None, 1, {}, torch.ones(7), torch.ones(3, 4, dtype=torch.float16)):
            buffer = io.BytesIO()
            torch.save(other, buffer)
            moved = copy.copy(info)
            moved.offset, moved.length = len(content), len(buffer.getvalue())
            where = {**said.storage_data, index: moved}
            now = type(said)(said.state_dict_metadata, said.planner_data, where)
            (file.parent / ".metadata").write_bytes(pickle.dumps(now))
            yield content + buffer.getvalue()


# -- the kinds -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    extra = {"loss": 0.5, "odd": (1, float("inf"), {2: torch.ones(2)})}
    folder = tmp_path_factory.mktemp("originals")
    one_of_each_kind(folder, nn.Sequential(nn.Linear(3, 4)), extra)
    (folder / "safetensors" / "config.json").write_text('{"a": [1], "dtype": "x"}')
    return folder


STEP, TAG = "step_00000001", "global_step2"
CASES: dict[str, tuple[str, Callable[[Path], Iterator[bytes]]]] = {
    "zip": ("zip/x.pt", zips),
    "legacy": ("legacy/x.pt", legacies),
    "bins": ("bins/pytorch_model.bin", zips),
    "dcp": ("dcp/.metadata", metadata),
    "dcp items": ("dcp/__0_0.distcp", items),
    "safetensors header": ("safetensors/model-00001-of-00002.safetensors", headers),
    "safetensors index": ("safetensors/model.safetensors.index.json", plain),
    "config": ("safetensors/config.json", plain),
    "manifest": (f"ours/{STEP}/manifest.json", manifests),
    "index": (f"ours/{STEP}/index.json", indexes),
    "model states": (f"deepspeed/{TAG}/zero_pp_rank_0_mp_rank_00_model_states.pt", zips),
    "optimizer states": (f"deepspeed/{TAG}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", zips),
}


def taken(path: Path, target: Path) -> str:
    """What is said of it; empty where it was taken."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        source = open_source(path)
        try:
            import_checkpoint(source, target / "ours")
            if path.name in ("safetensors", "ours"):
                export_safetensors(source, target / "theirs")
        finally:
            source.close()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", CASES)
def test_any_value_may_be_any_other(
    case: str,
    originals: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    name, changes = CASES[case]
    kind = name.partition("/")[0]
    path = shutil.copytree(originals / kind, tmp_path / kind)
    file, whole = tmp_path / name, path / "x.pt" if kind in ("zip", "legacy") else path
    assert not taken(whole, tmp_path / "out")
    lines: list[str] = []
    for number, content in enumerate(changes(file)):
        file.write_bytes(content)
        try:
            said = taken(whole, tmp_path / "out")
            if number % 20 == 0:
                code = main(["diff", str(whole), str(whole)])
                main(["ls", str(whole)])
                main(["verify", str(whole)])
                out, err = capsys.readouterr()
                assert code in (0, 2)
                assert err.count("\n") <= 2, err
                assert "Traceback" not in out + err
        except Exception as error:
            raise AssertionError(f"{case} {number}: {content!r}") from error
        lines.append(said)
    assert any(lines)
    # A pickle is run, in bounds, and may end in anything; all else is looked at before it is used.
    unforeseen = [t for t in lines if re.search(r"cannot be read: \w+(Error|Exception)", t)]
    assert not unforeseen, unforeseen[:5]
