"""Damaged checkpoints are refused by name, and no checkpoint can make its reader run code."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_kit import make, optimizer_of, same, snapshot, train

import shardwise as sw
from shardwise.checkpoint import store
from shardwise.checkpoint.files import FileEntry, write_checked
from shardwise.checkpoint.importing import open_source
from shardwise.checkpoint.said import Said
from shardwise.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = make()
    optimizer = optimizer_of(model)
    train(model, optimizer)
    return sw.CheckpointManager(folder).save(2, model, optimizer)


def load(path: Path) -> None:
    model = make(1)
    manager = sw.CheckpointManager(path.parent)
    manager.load(manager.open(path), model, optimizer_of(model))


def test_a_hundred_flipped_bits_and_truncations_are_each_refused_by_name(
    saved: Path, tmp_path: Path
) -> None:
    draw = random.Random(0)
    files = sorted(saved.iterdir())
    kinds = set()
    for i in range(100):
        damaged = tmp_path / "step_00000002"
        shutil.copytree(saved, damaged)
        file = damaged / files[i % len(files)].name
        content = bytearray(file.read_bytes())
        place = draw.randrange(len(content))
        if i % 4 == 3:
            file.write_bytes(content[:place])
        else:
            content[place] ^= 1 << draw.randrange(8)
            file.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            load(damaged)
        assert str(damaged) in str(caught.value)
        assert file.name in str(caught.value), str(caught.value)
        kinds.add((file.name, i % 4 == 3))
        # What is not verified before is refused as it is read, where it is read.
        manager = sw.CheckpointManager(tmp_path)
        assert manager.latest()[0] is None
        shutil.rmtree(damaged)
    assert len(kinds) == 2 * len(files)


def test_a_bit_that_flips_after_the_check_is_found_in_loading(saved: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "step_00000002"
    shutil.copytree(saved, damaged)
    manager = sw.CheckpointManager(tmp_path)
    checkpoint = manager.open(damaged)
    file = damaged / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    model = make(1)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors: damaged: bytes 0 to"):
        manager.load(checkpoint, model, optimizer_of(model))


def forge(path: Path, change: Any) -> None:
    """Another index under right checksums."""
    index = json.loads((path / "index.json").read_text())
    change(index)
    entry = write_checked(path / "index.json", json.dumps(index).encode())
    manifest = json.loads((path / store.MANIFEST).read_text())
    files = {name: FileEntry.from_json(Said(v, "here")) for name, v in manifest["files"].items()}
    saving = path.with_name(f".saving_{path.name}")
    path.rename(saving)
    store.commit(saving, manifest["step"], manifest["world_size"], {**files, "index.json": entry})


def at(index: Any, key: str, **values: Any) -> None:
    index["tensors"][key]["chunks"][0].update(values)


W = "model.unused"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda i: at(i, W, file="../other"), "lies in '../other', which the manifest"),
        (lambda i: at(i, W, file="/etc/passwd"), "lies in '/etc/passwd', which the manifest"),
        (lambda i: at(i, W, offset=2**40), "bytes at 1099511627776 of rank_00000"),
        (lambda i: at(i, W, offset=-8), "offset: expected whole numbers"),
        (lambda i: at(i, W, size=[6, 3]), "its parts have 18 of 21 elements"),
        (lambda i: at(i, W, start=[1, 0]), "is not inside of (7, 3)"),
        (lambda i: i["tensors"][W].update(dtype="F33"), "unknown dtype 'F33'"),
        (lambda i: i["tensors"][W].update(shape=[7, "3"]), "expected whole numbers"),
        (lambda i: i["tensors"][W].update(dim=2), "dim 2 of shape (7, 3)"),
        (lambda i: i["tensors"][W].update(more=1), "expected the keys"),
        (lambda i: i.update(ties={"a": "b"}), "a is tied to 'b'"),
        (lambda i: i["objects"].update(extra={"$eval": "1"}), "$eval: unknown tag"),
        (lambda i: i["tensors"][W]["chunks"].append(i["tensors"][W]["chunks"][0]), "42 of 21"),
    ],
)
def test_an_index_that_lies_is_refused(
    saved: Path, tmp_path: Path, change: Any, expected: str
) -> None:
    path = tmp_path / "step_00000002"
    shutil.copytree(saved, path)
    forge(path, lambda index: None)
    load(path)
    forge(path, change)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert expected in str(caught.value)


# -- pickles -------------------------------------------------------------------------------------
class Evil:
    """Pickles to a call of os.mkdir."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def torch_file(mark: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2), "evil": Evil(mark)}, buffer)
    return buffer.getvalue()


def legacy_file(mark: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"evil": Evil(mark)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def test_the_payload_works_where_it_is_let(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Evil(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("payload", [torch_file, legacy_file, lambda m: pickle.dumps(Evil(m))])
def test_malicious_pickles_run_nothing_wherever_they_lie(
    saved: Path, tmp_path: Path, payload: Any
) -> None:
    mark = tmp_path / "ran"
    evil = payload(mark)
    for name in ("manifest.json", "index.json", "rank_00000.safetensors"):
        path = tmp_path / "step_00000002"
        shutil.copytree(saved, path)
        (path / name).write_bytes(evil)
        with pytest.raises(CheckpointError):
            load(path)
        with pytest.raises(CheckpointError):
            open_source(path)
        shutil.rmtree(path)
    for name in ("x.pt", "x.bin", "x.safetensors", "pytorch_model.bin", "model.safetensors"):
        (tmp_path / "there").mkdir()
        (tmp_path / "there" / name).write_bytes(evil)
        for at in (tmp_path / "there" / name, tmp_path / "there"):
            with pytest.raises(CheckpointError):
                open_source(at)
        shutil.rmtree(tmp_path / "there")
    tag = tmp_path / "ds" / "global_step1"
    tag.mkdir(parents=True)
    (tmp_path / "ds" / "latest").write_text("global_step1")
    for kind in ("model_states", "optim_states"):
        (tag / f"zero_pp_rank_0_mp_rank_00_{kind}.pt").write_bytes(evil)
    with pytest.raises(CheckpointError, match="refused"):
        open_source(tmp_path / "ds")
    assert not mark.exists()


def test_malicious_dcp_checkpoints_run_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = tmp_path / "dcp"
    dcp.save({"model": make().state_dict(), "note": "text"}, checkpoint_id=path)
    metadata = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(CheckpointError, match=r"refused: names (posix|nt)\.mkdir"):
        open_source(path)
    for module, name in (("builtins", "eval"), ("os", "system"), ("torch", "load")):
        line = f"c{module}\n{name}\n(S'x'\ntR.".encode()
        (path / ".metadata").write_bytes(line)
        with pytest.raises(CheckpointError, match=f"names {module}.{name}"):
            open_source(path)
    (path / ".metadata").write_bytes(metadata)
    [data] = path.glob("*.distcp")
    content = data.read_bytes()
    evil = torch_file(mark)
    data.write_bytes(evil + content[len(evil) :])
    with pytest.raises(CheckpointError, match=data.name):
        source = open_source(path)
        sw.load_pretrained(make(), path)
        source.close()
    assert not mark.exists()


def test_whole_archives_with_a_bad_pickle_inside(tmp_path: Path) -> None:
    """The zip of a real weights file with its pickle replaced."""
    mark = tmp_path / "ran"
    torch.save(make().state_dict(), tmp_path / "good.pt")
    with (
        zipfile.ZipFile(tmp_path / "good.pt") as good,
        zipfile.ZipFile(tmp_path / "bad.pt", "w", zipfile.ZIP_STORED) as bad,
    ):
        for name in good.namelist():
            evil = name.endswith("data.pkl")
            bad.writestr(name, pickle.dumps(Evil(mark), 2) if evil else good.read(name))
    with pytest.raises(CheckpointError, match="refused"):
        open_source(tmp_path / "bad.pt")
    assert not mark.exists()
    model = make(1)
    sw.load_pretrained(model, tmp_path / "good.pt")
    same(snapshot(model), snapshot(make()))
