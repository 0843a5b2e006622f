"""Jobs that end without a word go on from their hosts' memory, with the numbers of a run that
nothing interrupted; copies that are damaged, older, or another run's are not taken."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import checkpoint_names, read_rows, results, run_job

from ranks import on_ranks, run_ranks, spawn_ranks
from shardwise.checkpoint import store, writing
from shardwise.checkpoint.files import CheckedWriter
from shardwise.checkpoint.manager import CheckpointManager
from shardwise.checkpoint.memory import MemoryCopies
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.source import CheckpointSource, read_whole
from shardwise.errors import CheckpointError, ConfigError, TrainingError
from shardwise.train.memory import VARIABLE

EXACT = {"run__reproducible": "any_world", "train__micro_batch": 1}


@contextlib.contextmanager
def memory_in(folder: Path) -> Any:
    """This rank's host keeps its copies there; other ranks may have other hosts."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def job(rank: int, world: int, run: Path, hosts: str = "0000", **options: Any) -> str:
    """Runs it with copies on the rank's host, a digit of `hosts`; what rank 0 said."""
    said = io.StringIO()
    with memory_in(run.parent / f"memory{hosts[rank]}"), contextlib.redirect_stdout(said):
        run_job(run, **options)
    return said.getvalue()


def copies(folder: Path, host: int = 0) -> list[Path]:
    return sorted(folder.glob(f"memory{host}/*/step_*"))


def weights(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint but random state."""
    newest = store.list_checkpoints(run / "checkpoints").complete[0]
    source = CheckpointSource(newest)
    found = {k: read_whole(source, k) for k in source.tensors if not k.startswith("rng.")}
    source.close()
    return found


def equal(run: Path, whole: Path) -> None:
    assert results(run) == results(whole)
    found, expected = weights(run), weights(whole)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@on_ranks(2)
def test_it_goes_on_from_memory_without_reading_the_disk(
    rank: int, world: int, tmp_path: Path, monkeypatch: Any
) -> None:
    options = {"checkpoint__every": 3, "checkpoint__memory_every": 2}
    run_job(tmp_path / "whole")
    run = tmp_path / "run"
    job(rank, world, run, die_in=6, **options)
    assert checkpoint_names(run) == ["step_00000003"]
    assert [p.name for p in copies(tmp_path)] == ["step_00000004"]
    assert len(read_rows(run)) == 5

    def refuse(*args: Any) -> None:
        raise AssertionError("a checkpoint on disk is read")

    dist.barrier()
    monkeypatch.setattr(CheckpointManager, "verify", refuse)
    said = job(rank, world, run, checkpoint__rehearsal=False, **options)
    monkeypatch.undo()
    assert rank or f"continuing from memory at step 4: {tmp_path}/memory0/" in said
    assert results(run) == results(tmp_path / "whole")
    assert list(tmp_path.glob("memory0/*")) == []  # given back


@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op", "hybrid_shard"])
@on_ranks(2)
def test_strategies_with_replicas_share_the_copy(
    rank: int, world: int, tmp_path: Path, strategy: str
) -> None:
    options: dict[str, Any] = {"shard__strategy": strategy, "checkpoint__memory_every": 1}
    if strategy == "hybrid_shard":
        options["mesh__replicate"] = 2
    run_job(tmp_path / "whole", **options | {"checkpoint__memory_every": 0})
    job(rank, world, tmp_path / "run", die_in=4, **options)
    [path] = copies(tmp_path)
    dist.barrier()
    size = store.read_checkpoint(path).size_bytes
    assert "memory at step 3" in job(rank, world, tmp_path / "run", **options) or rank
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    on_disk = store.list_checkpoints(tmp_path / "whole/checkpoints").complete[0].size_bytes
    assert size == pytest.approx(on_disk, rel=0.05)  # one state in all, not one a replica


@pytest.mark.parametrize(
    ("first", "lost", "then"),
    [("00", None, "00"), ("00", None, "0"), ("01", 1, "01"), ("01", 0, "1"), ("012", 1, "02")],
)
def test_any_world_shows_no_interruption(
    tmp_path: Path, first: str, lost: int | None, then: str
) -> None:
    """On as many ranks or fewer, of one host or of several of which one is lost: the same bits."""
    options = {"checkpoint__memory_every": 2, **EXACT}
    run_ranks(1, job, tmp_path / "whole", **EXACT)
    run_ranks(len(first), job, tmp_path / "run", first, die_in=6, **options)
    assert checkpoint_names(tmp_path / "run") == []
    if lost is not None:
        shutil.rmtree(tmp_path / f"memory{lost}")
    said = run_ranks(len(then), job, tmp_path / "run", then, **options)[0]
    assert "continuing from memory at step 4" in said
    equal(tmp_path / "run", tmp_path / "whole")
    assert list(tmp_path.glob("memory*/*")) == []


def die_at(rank: int, world: int, run: Path, moment: str, host: str, **options: Any) -> None:
    """A job whose rank 1 kills itself with signal 9 in its third copy to memory."""
    calls = 0
    places = {
        "written": (CheckedWriter, "finish"),
        "sending": (writing, "move_files"),
        "committing": (store, "commit"),
        "deleting": (store, "keep_only"),
    }
    owner, name = places[moment]
    action = getattr(owner, name)

    def strike(*args: Any) -> Any:
        nonlocal calls
        path = getattr(args[0], "path", args[-1] if moment == "sending" else args[0])
        calls += "memory" in str(path)  # not the rehearsal on disk
        if calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return action(*args)

    if rank == 1:
        setattr(owner, name, strike)
    job(rank, world, run, host, **options)


@pytest.mark.parametrize(
    ("moment", "hosts", "step"),
    [
        ("written", "00", 2),
        ("sending", "01", 2),
        ("committing", "01", 3),  # the other host has committed it, and holds all
        ("deleting", "01", 3),
    ],
)
def test_kill_9_during_the_copy_leaves_one(
    tmp_path: Path, moment: str, hosts: str, step: int
) -> None:
    options = {"checkpoint__memory_every": 1, **EXACT}
    run_ranks(1, job, tmp_path / "whole", **EXACT)
    with spawn_ranks(2, die_at, tmp_path / "run", moment, hosts, **options) as group:
        outcomes = group.join(60, grace_s=5)
    assert outcomes[1].kind == "died", outcomes[1]
    left = [p.name for host in (0, 1) for p in copies(tmp_path, host)]
    assert left, "no copy is left"
    said = run_ranks(2, job, tmp_path / "run", hosts, **options)[0]
    assert f"continuing from memory at step {step}" in said
    equal(tmp_path / "run", tmp_path / "whole")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@on_ranks(2)
def test_a_damaged_copy_is_named_and_the_disk_taken(rank: int, world: int, tmp_path: Path) -> None:
    options = {"checkpoint__every": 3, "checkpoint__memory_every": 2}
    run_job(tmp_path / "whole")
    job(rank, world, tmp_path / "run", die_in=6, **options)
    [path] = copies(tmp_path)
    dist.barrier()
    if rank == 0:
        flip(path / "rank_00001.safetensors")
    dist.barrier()
    said = job(rank, world, tmp_path / "run", **options)
    if rank == 0:
        assert f"skipped {path}/rank_00001.safetensors: damaged: bytes" in said
        assert f"continuing from {tmp_path}/run/checkpoints/step_00000003" in said
    assert results(tmp_path / "run") == results(tmp_path / "whole")


@on_ranks(2)
def test_what_is_older_than_the_disk_is_not_taken(rank: int, world: int, tmp_path: Path) -> None:
    """Nor ever again: the run has gone on from somewhere else since."""
    options = {"checkpoint__every": 5, "checkpoint__memory_every": 4}
    run = tmp_path / "run"
    job(rank, world, run, die_in=7, **options)
    [old] = copies(tmp_path)
    assert old.name == "step_00000004"
    dist.barrier()
    if rank == 0:  # what a disk that came back late would show
        shutil.copytree(old.parent, tmp_path / "kept")
        shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    dist.barrier()
    said = job(rank, world, run, die_in=1, **options)
    assert rank or f"continuing from {run}/checkpoints/step_00000005" in said
    assert not old.exists()
    dist.barrier()
    if rank == 0:
        shutil.copytree(tmp_path / "kept", old.parent)
        shutil.rmtree(run / "checkpoints/step_00000005")
    dist.barrier()
    said = job(rank, world, run, die_in=1, **options)
    assert "continuing" not in said
    assert not old.exists()


@on_ranks(2)
def test_another_run_never_takes_it(rank: int, world: int, tmp_path: Path) -> None:
    """A directory that was made anew starts at zero; a copy of a run directory has no part in the
    memory of the original, and neither removes what is not its own."""
    options = {"checkpoint__memory_every": 2}
    run, twin = tmp_path / "run", tmp_path / "twin"
    job(rank, world, run, die_in=4, **options)
    [old] = copies(tmp_path)
    dist.barrier()
    if rank == 0:
        shutil.copytree(run, twin)
    dist.barrier()
    assert "continuing" not in job(rank, world, twin, die_in=2, **options)
    assert old.exists()
    assert len(copies(tmp_path)) == 2
    dist.barrier()
    if rank == 0:  # the same path, as another container may have it, with another directory there
        shutil.copytree(run, tmp_path / "image")
        shutil.rmtree(run)
        (tmp_path / "image").rename(run)
    dist.barrier()
    assert "continuing" not in job(rank, world, run, die_in=2, **options)
    assert old.exists()
    assert len(copies(tmp_path)) == 3
    dist.barrier()
    if rank == 0:
        shutil.rmtree(run)
    dist.barrier()
    assert "continuing" not in job(rank, world, run, die_in=2, **options)
    assert old.exists()


@on_ranks(2)
def test_only_folders_of_this_run_are_removed(rank: int, world: int, tmp_path: Path) -> None:
    options = {"checkpoint__memory_every": 1, "checkpoint__every": 0}
    run, memory = tmp_path / "run", tmp_path / "memory0"
    job(rank, world, run, die_in=3, **options)
    [mine] = [path.parent for path in copies(tmp_path)]
    dist.barrier()
    foreign = [memory / name for name in ("data", "0123456789abcdef", "a" * 16, "linked", "f" * 16)]
    if rank == 0:
        for folder in foreign[:3]:  # what others keep there, marked like ours or not
            folder.mkdir()
            (folder / "results").write_text("years of work")
        (foreign[0] / "owner").write_text("bob")
        (foreign[1] / "owner").write_text(f"{tmp_path}/gone")
        (foreign[2] / "owner").write_text((mine / "owner").read_text().replace("run", "other"))
        foreign[3].symlink_to(tmp_path / "home")
        shutil.copytree(mine, tmp_path / "home")
        shutil.copytree(mine, tmp_path / "elsewhere")
        foreign[4].symlink_to(tmp_path / "elsewhere")
        names = run / "memory_id"
        names.write_text("\n".join([names.read_text(), "../data", "f" * 16, "a" * 16]))
        (mine / "owner").rename(mine / "kept")  # not marked any more: nobody's
    dist.barrier()
    assert "continuing" not in job(rank, world, run, die_in=3, **options)
    assert all(os.path.lexists(folder) for folder in [*foreign, mine])
    assert (tmp_path / "home/owner").exists()
    assert (tmp_path / "elsewhere/owner").exists()
    assert all((folder / "results").read_text() for folder in foreign[:3])
    dist.barrier()
    if rank == 0:
        (mine / "kept").rename(mine / "owner")
        for path in copies(tmp_path):  # what the last start has: lost
            if path.parent not in (mine, *foreign):
                shutil.rmtree(path)
    dist.barrier()
    job(rank, world, run, die_in=3, **options)
    assert not mine.exists()  # an earlier start of this run
    assert all(os.path.lexists(folder) for folder in foreign)


@on_ranks(1)
def test_a_folder_that_is_a_link_is_not_followed(rank: int, tmp_path: Path) -> None:
    folder, home = tmp_path / "shared" / ("0" * 16), tmp_path / "home"
    home.mkdir()
    folder.parent.mkdir()
    (home / "owner").write_text("mark")
    folder.symlink_to(home)
    found = MemoryCopies(folder, Ranks(), owner="mark")
    assert found.latest() == (None, [])
    with pytest.raises(CheckpointError, match="holds copies of another run, or something else"):
        found.claim()
    found.clear()
    assert (home / "owner").exists()
    assert folder.is_symlink()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model__dim": 64}, ConfigError, "step_00000004: is of another model"),
        ({"run__seed": 1}, ConfigError, "step_00000004: was trained on other data"),
        ({"checkpoint__resume": "off"}, ConfigError, "resume: is off, but .*memory0.* holds"),
    ],
)
@on_ranks(2)
def test_another_configuration_is_refused(
    rank: int, world: int, tmp_path: Path, change: Any, error: Any, text: str
) -> None:
    options = {"checkpoint__memory_every": 2}
    job(rank, world, tmp_path / "run", die_in=6, **options)
    with pytest.raises(error, match=text):
        job(rank, world, tmp_path / "run", **options, **change)
    [path] = copies(tmp_path)
    assert path.name == "step_00000004"  # and is left alone


@on_ranks(2)
def test_a_run_that_has_no_step_left_is_on_disk_before_memory_goes(
    rank: int, world: int, tmp_path: Path
) -> None:
    options = {"checkpoint__memory_every": 4}
    job(rank, world, tmp_path / "run", die_in=6, **options)
    assert checkpoint_names(tmp_path / "run") == []
    job(rank, world, tmp_path / "run", train__steps=4, **options)
    assert checkpoint_names(tmp_path / "run") == ["step_00000004"]
    assert list(tmp_path.glob("memory0/*")) == []


@on_ranks(2)
def test_memory_is_given_back_when_a_job_ends(rank: int, world: int, tmp_path: Path) -> None:
    options = {"checkpoint__memory_every": 1}
    job(rank, world, tmp_path / "run", stop_after=3, **options)
    assert checkpoint_names(tmp_path / "run") == ["step_00000003"]
    assert list(tmp_path.glob("memory0/*")) == []
    # A loss that is no number would come again from the step before.
    with pytest.raises(TrainingError, match=r"is nan|is inf"):
        job(rank, world, tmp_path / "other", **options, optim__lr=1e38, optim__warmup_steps=0)
    assert list(tmp_path.glob("memory0/*")) == []


@on_ranks(1)
def test_a_folder_that_cannot_be_had_is_named(rank: int, world: int, tmp_path: Path) -> None:
    with memory_in(tmp_path / "no/such"), pytest.raises(CheckpointError) as caught:
        run_job(tmp_path / "run", checkpoint__memory_every=1)
    assert "checkpoint.memory_every: " in str(caught.value)
    assert VARIABLE in str(caught.value)
    assert "\n" not in str(caught.value)
