"""Checkpoint directories: complete or not there, whenever the writer is killed."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from search import TIMES
from shardwise.checkpoint import store
from shardwise.checkpoint.files import (
    BLOCK_BYTES,
    CheckedFile,
    CheckedWriter,
    FileEntry,
    replace_file,
    write_checked,
)
from shardwise.checkpoint.said import Said
from shardwise.errors import CheckpointError


def write(directory, step, content=b"x" * 100):
    saving = store.begin(directory / store.step_name(step))
    return store.commit(saving, step, 2, {"data": write_checked(saving / "data", content)})


def steps(directory):
    return [c.step for c in store.list_checkpoints(directory).complete]


def test_a_checkpoint_counts_once_committed(tmp_path):
    saving = store.begin(tmp_path / "step_00000003")
    entry = write_checked(saving / "data", b"abc")
    assert steps(tmp_path) == []
    path = store.commit(saving, 3, 2, {"data": entry})
    [found] = store.list_checkpoints(tmp_path).complete
    assert (found.path, found.step, found.world_size) == (path, 3, 2)
    assert path.name == "step_00000003"
    assert store.verify(found) == []


def test_newest_comes_first_and_other_names_are_ignored(tmp_path):
    for step in (1, 10, 9, 123456789):
        write(tmp_path, step)
    (tmp_path / "step_old").mkdir()
    (tmp_path / "notes.txt").touch()
    found = store.list_checkpoints(tmp_path)
    assert [c.step for c in found.complete] == [123456789, 10, 9, 1]
    assert found.skipped == ()


def rewrite(path, **changes):
    """A manifest with a right checksum and wrong content: what an attacker or a bug would write."""
    manifest = json.loads((path / store.MANIFEST).read_text())
    del manifest["checksum"]
    rest = json.dumps({**manifest, **changes}, indent=1).encode().removeprefix(b"{\n")
    first = b'{"checksum": "%s",\n' % hashlib.sha256(rest).hexdigest().encode()
    (path / store.MANIFEST).write_bytes(first + rest)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "data").unlink(), "data is missing"),
        (lambda path: os.truncate(path / "data", 50), "50 bytes instead of 100"),
        (lambda path: (path / store.MANIFEST).unlink(), "incomplete"),
        (lambda path: (path / store.MANIFEST).write_text('{"form'), "damaged (manifest.json"),
        (lambda path: (path / store.MANIFEST).write_text('{"format": 1}'), "checkpoint import"),
        (lambda path: rewrite(path, format=99), "is of format 99, this version reads 2"),
        (lambda path: rewrite(path, files={"../x": {}}), "'../x', which is no file name"),
        (lambda path: rewrite(path, files={"data": {}}), "has no size_bytes"),
        (lambda path: rewrite(path, step="1"), "step: expected whole numbers"),
    ],
)
def test_damaged_ones_are_passed_over_with_the_reason(tmp_path, damage, reason):
    write(tmp_path, 1)
    damage(write(tmp_path, 2))
    found = store.list_checkpoints(tmp_path)
    assert [c.step for c in found.complete] == [1]
    [(name, text)] = found.skipped
    assert name == "step_00000002"
    assert reason in text


def test_a_flipped_bit_is_found_by_those_who_read_its_block(tmp_path):
    path = write(tmp_path, 1, bytes(2 * BLOCK_BYTES + 5))
    content = bytearray((path / "data").read_bytes())
    content[BLOCK_BYTES + 30] ^= 4
    (path / "data").write_bytes(content)
    [found] = store.list_checkpoints(tmp_path).complete  # the size is right
    [text] = store.verify(found)
    assert f"{path / 'data'}: damaged: bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES}" in text
    parts = [store.verify(found, part=r, num_parts=3) for r in range(3)]
    assert [len(p) for p in parts] == [0, 1, 0]
    with found.open("data") as file:
        assert file.read(BLOCK_BYTES - 2, 2) == b"\0\0"
        assert file.read(2 * BLOCK_BYTES, 5) == bytes(5)
        for offset, size in ((BLOCK_BYTES - 2, 3), (2 * BLOCK_BYTES - 1, 1), (BLOCK_BYTES, 9)):
            with pytest.raises(CheckpointError, match="checksum"):
                file.read(offset, size)
        with pytest.raises(CheckpointError, match="are wanted, the file has"):
            file.read(2 * BLOCK_BYTES, 6)


@settings(max_examples=40 * TIMES, deadline=None)
@given(data=st.data())
def test_parts_are_read_as_they_were_written(tmp_path_factory, data):
    """Any sizes of writes and any part, blocks of 1 MiB in between."""
    size = data.draw(st.sampled_from([0, 1, 17, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES - 7]))
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    path = tmp_path_factory.mktemp("files") / "f"
    writer, done = CheckedWriter(path, size), 0
    while done < size:
        step = data.draw(st.integers(min((size - done + 3) // 4, size - done), size - done))
        writer.write(content[done : done + step])
        done += step
    entry = writer.finish()
    assert path.read_bytes() == content
    with CheckedFile(path, entry) as file:
        for _ in range(4):
            start = data.draw(st.integers(0, size))
            length = data.draw(st.integers(0, size - start))
            assert file.read(start, length) == content[start : start + length]
    assert entry == FileEntry.from_json(Said(json.loads(json.dumps(entry.to_json())), "here"))


def test_a_full_disk_shows_before_anything_is_written(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        CheckedWriter(tmp_path / "f", 10)


def test_a_kill_between_two_renames_loses_nothing(tmp_path, monkeypatch):
    """Saving a step again moves the old one aside; the new one is complete under `.saving_`."""
    write(tmp_path, 5, b"old")
    renamed = []

    def stop_at_second(self, target):
        renamed.append(self.name)
        if len(renamed) == 2:
            raise KeyboardInterrupt
        os.rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(tmp_path), "rename", stop_at_second)
        write(tmp_path, 5, b"new")
    assert renamed == ["step_00000005", ".saving_step_00000005"]
    [found] = store.list_checkpoints(tmp_path).complete
    assert (found.path / "data").read_bytes() == b"new"
    store.clean(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]
    assert steps(tmp_path) == [5]


@settings(max_examples=30 * TIMES)
@given(
    saved=st.lists(st.integers(0, 50), min_size=1, max_size=8, unique=True),
    broken=st.sets(st.integers(0, 50), max_size=4),
    keep=st.integers(0, 4),
)
def test_retention_keeps_the_newest_complete_ones(tmp_path_factory, saved, broken, keep):
    directory = tmp_path_factory.mktemp("run")
    for step in saved:
        path = write(directory, step)
        if step in broken:
            (path / store.MANIFEST).unlink()
    complete = sorted(set(saved) - broken, reverse=True)
    store.prune(directory, keep)
    assert steps(directory) == (complete[:keep] if keep else complete)
    left = {p.name for p in directory.iterdir()}
    assert {f"step_{s:08d}" for s in broken & set(saved)} <= left  # not ours to delete


def test_a_damaged_one_is_replaced_by_its_successor(tmp_path):
    (write(tmp_path, 5) / "data").unlink()
    write(tmp_path, 5, b"new")
    [found] = store.list_checkpoints(tmp_path).complete
    assert (found.path / "data").read_bytes() == b"new"


def test_clean_removes_leftovers_only(tmp_path):
    write(tmp_path, 1)
    store.begin(tmp_path / "step_00000002")
    (tmp_path / ".deleting_step_00000000").mkdir()
    store.clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001"]


def test_replace_file_is_all_or_nothing(tmp_path):
    replace_file(tmp_path / "f", b"one")
    replace_file(tmp_path / "f", b"two")
    assert (tmp_path / "f").read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


WRITER = """
import os, sys
from pathlib import Path
from shardwise.checkpoint import store
from shardwise.checkpoint.files import (
    BLOCK_BYTES,
    CheckedFile,
    CheckedWriter,
    FileEntry,
    replace_file,
    write_checked,
)
from shardwise.checkpoint.said import Said
from shardwise.errors import CheckpointError

directory, step = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
while True:
    step += 1
    saving = store.begin(directory / store.step_name(step))
    content = step.to_bytes(4, "little") * 50_000
    files = {name: write_checked(saving / name, content) for name in ("a", "b")}
    store.commit(saving, step, 1, files)
    store.prune(directory, 2)
"""


def test_kill_9_at_any_moment_leaves_the_last_complete_one(tmp_path):
    """A writer that saves as fast as it can is killed again and again, a little later each time."""
    newest = 0
    for round_number in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(newest)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 60
        while newest == 0 and not steps(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.0037 * (round_number + 1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = store.list_checkpoints(tmp_path)
        assert found.skipped == ()
        assert found.complete[0].step >= newest
        newest = found.complete[0].step
        # Two, and one for each kill that came between a commit and the deletion after it.
        assert len(found.complete) <= 3 + round_number
        for checkpoint in found.complete:
            assert store.verify(checkpoint) == []
            expected = checkpoint.step.to_bytes(4, "little") * 50_000
            assert (checkpoint.path / "b").read_bytes() == expected
        store.clean(tmp_path)
        assert all(p.name.startswith("step_") for p in tmp_path.iterdir())
