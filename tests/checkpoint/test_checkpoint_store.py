"""Checkpoint directories: complete or not there, whenever the writer is killed."""

import os
import signal
import subprocess
import sys
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shardwise.checkpoint import store


def write(directory, step, content=b"x" * 100):
    saving = store.begin(directory, step)
    (saving / "data").write_bytes(content)
    return store.commit(saving, step, 2, store.describe_files([saving / "data"]))


def steps(directory):
    return [c.step for c in store.list_checkpoints(directory).complete]


def test_a_checkpoint_counts_once_committed(tmp_path):
    saving = store.begin(tmp_path, 3)
    (saving / "data").write_bytes(b"abc")
    assert steps(tmp_path) == []
    path = store.commit(saving, 3, 2, store.describe_files([saving / "data"]))
    [found] = store.list_checkpoints(tmp_path).complete
    assert (found.path, found.step, found.world_size) == (path, 3, 2)
    assert path.name == "step_00000003"
    assert store.damaged_files(found) == []


def test_newest_comes_first_and_other_names_are_ignored(tmp_path):
    for step in (1, 10, 9, 123456789):
        write(tmp_path, step)
    (tmp_path / "step_old").mkdir()
    (tmp_path / "notes.txt").touch()
    found = store.list_checkpoints(tmp_path)
    assert [c.step for c in found.complete] == [123456789, 10, 9, 1]
    assert found.skipped == ()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "data").unlink(), "data is missing"),
        (lambda path: os.truncate(path / "data", 50), "50 bytes instead of 100"),
        (lambda path: (path / store.MANIFEST).unlink(), "incomplete"),
        (lambda path: (path / store.MANIFEST).write_text('{"form'), "damaged (manifest.json"),
        (lambda path: (path / store.MANIFEST).write_text('{"format": 99}'), "of format 1"),
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


def test_a_flipped_bit_is_found(tmp_path):
    path = write(tmp_path, 1)
    content = bytearray((path / "data").read_bytes())
    content[30] ^= 4
    (path / "data").write_bytes(content)
    [found] = store.list_checkpoints(tmp_path).complete  # the size is right
    assert store.damaged_files(found) == ["data"]


@settings(max_examples=30)
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
    store.begin(tmp_path, 2)
    (tmp_path / ".deleting_step_00000000").mkdir()
    store.clean(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001"]


def test_replace_file_is_all_or_nothing(tmp_path):
    store.replace_file(tmp_path / "f", b"one")
    store.replace_file(tmp_path / "f", b"two")
    assert (tmp_path / "f").read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


WRITER = """
import os, sys
from pathlib import Path
from shardwise.checkpoint import store

directory, step = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
while True:
    step += 1
    saving = store.begin(directory, step)
    for name in ("a", "b"):
        store.write_synced(saving / name, step.to_bytes(4, "little") * 50_000)
    files = store.describe_files([saving / "a", saving / "b"])
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
        assert len(found.complete) <= 3  # two, and one whose deletion was still to come
        for checkpoint in found.complete:
            assert store.damaged_files(checkpoint) == []
            expected = checkpoint.step.to_bytes(4, "little") * 50_000
            assert (checkpoint.path / "b").read_bytes() == expected
        store.clean(tmp_path)
        assert all(p.name.startswith("step_") for p in tmp_path.iterdir())
