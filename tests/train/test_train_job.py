"""Whole jobs: they learn, continue as if never interrupted, stop together and refuse what is
wrong."""

import contextlib
import errno
import fcntl
import io
import os
import shutil
import signal
import stat
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from jobs import checkpoint_names, read_rows, results, run_job

from ranks import on_ranks, run_ranks
from shardwise.checkpoint import files
from shardwise.errors import CheckpointError, ConfigError, TrainingError
from shardwise.train.config_file import load_config
from shardwise.train.limits import explain
from shardwise.train.run_dir import RunDir

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def refused(kind=ConfigError):
    """The block raises that error, with a text of one line, on every rank."""
    with pytest.raises(kind) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def snapshot(directory):
    """Path -> (size, time) of everything below a directory."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            stat = Path(folder, name).stat()
            found[f"{folder}/{name}"] = (stat.st_size, stat.st_mtime_ns)
    return found


@on_ranks(1, 2)
def test_the_loss_falls_and_every_step_has_a_row(rank, tmp_path):
    run_job(tmp_path / "run", train__steps=40, train__eval_every=20, optim__lr=0.01)
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert rows[-1]["loss"] < 0.75 * rows[0]["loss"]
    assert [row["step"] for row in rows if "val_loss" in row] == [20, 40]
    assert rows[-1]["val_loss"] < rows[19]["val_loss"] < rows[0]["loss"]
    for key in ("grad_norm", "lr", "tokens_per_s", "step_time_s", "peak_memory_bytes"):
        assert all(row[key] > 0 for row in rows)
    assert checkpoint_names(tmp_path / "run") == ["step_00000040"]


@on_ranks(2)
def test_stopped_and_continued_equals_never_stopped(rank, tmp_path):
    """Bit for bit: losses, norms, evaluations, and the checkpoint's own bytes."""
    run_job(tmp_path / "whole")
    run_job(tmp_path / "parts", stop_after=3 if rank == 1 else None)
    assert checkpoint_names(tmp_path / "parts") == ["step_00000003"]
    run_job(tmp_path / "parts", stop_after=2 if rank == 0 else None)
    assert checkpoint_names(tmp_path / "parts") == ["step_00000003", "step_00000005"]
    run_job(tmp_path / "parts")
    assert results(tmp_path / "parts") == results(tmp_path / "whole")
    name = f"checkpoints/step_00000008/rank_{rank:05d}.safetensors"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@on_ranks(2)
def test_killed_after_a_checkpoint_continues_there(rank, tmp_path):
    """What a kill leaves: rows of later steps, half a checkpoint, half a line."""
    run_job(tmp_path / "whole", checkpoint__every=3)
    run_job(tmp_path / "run", checkpoint__every=3, stop_after=7)
    run = tmp_path / "run"
    if rank == 0:
        shutil.rmtree(run / "checkpoints/step_00000007")
        (run / "checkpoints/.saving_step_00000007").mkdir()
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8, "lo')
    dist.barrier()
    run_job(run, checkpoint__every=3)
    assert results(run) == results(tmp_path / "whole")
    assert checkpoint_names(run) == ["step_00000006", "step_00000008"]


@on_ranks(2)
def test_damaged_checkpoint_is_passed_over(rank, tmp_path):
    run_job(tmp_path / "whole", checkpoint__every=2)
    run = tmp_path / "run"
    run_job(run, checkpoint__every=2, stop_after=6)
    if rank == 0:
        path = run / "checkpoints/step_00000006/rank_00001.safetensors"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    dist.barrier()
    run_job(run, checkpoint__every=2)
    assert results(run) == results(tmp_path / "whole")


@pytest.mark.parametrize("strategy", ["no_shard", "shard_optimizer", "shard_grad_op", "full_shard"])
@on_ranks(2)
def test_every_strategy_trains_and_continues_alike(rank, tmp_path, strategy):
    run_job(tmp_path / "plain")
    run_job(tmp_path / "run", shard__strategy=strategy, stop_after=4)
    run_job(tmp_path / "run", shard__strategy=strategy)
    for row, plain in zip(results(tmp_path / "run"), results(tmp_path / "plain"), strict=True):
        assert row[1:3] == pytest.approx(plain[1:3], rel=1e-4)


def job_in_parts(rank, world, directory, **options):
    run_job(directory, **options)
    return results(directory)


def test_another_world_size_continues(tmp_path):
    """2 ranks, then 3, then 1: the same samples and, up to rounding, the same numbers."""
    run_ranks(2, job_in_parts, tmp_path / "whole")
    run_ranks(2, job_in_parts, tmp_path / "run", stop_after=3)
    run_ranks(3, job_in_parts, tmp_path / "run", stop_after=3)
    run_ranks(1, job_in_parts, tmp_path / "run")
    whole = results(tmp_path / "whole")
    for row, expected in zip(results(tmp_path / "run"), whole, strict=True):
        for value, wanted in zip(row, expected, strict=True):
            assert value == (wanted if wanted is None else pytest.approx(wanted, rel=1e-4))


@on_ranks(4)
def test_hybrid_mesh_trains_and_continues_on_a_flat_one(rank, tmp_path):
    sizes = {"train__global_batch": 8, "train__micro_batch": 1}
    run_job(tmp_path / "plain", **sizes)
    for strategy in ("auto", "hybrid_full_optimizer"):
        run, hybrid = tmp_path / strategy, {"mesh__replicate": 2, "shard__strategy": strategy}
        run_job(run, stop_after=3, **hybrid, **sizes)
        run_job(run, **sizes)
        for row, plain in zip(results(run), results(tmp_path / "plain"), strict=True):
            assert row[1:3] == pytest.approx(plain[1:3], rel=1e-4)


@on_ranks(2)
def test_micro_batches_do_not_change_the_result(rank, tmp_path):
    run_job(tmp_path / "small", train__micro_batch=1)
    run_job(tmp_path / "large", train__micro_batch=6)
    large = results(tmp_path / "large")
    for row, expected in zip(results(tmp_path / "small"), large, strict=True):
        assert row[1:3] == pytest.approx(expected[1:3], rel=1e-4)


@on_ranks(2)
def test_bfloat16_and_activation_checkpointing_learn(rank, tmp_path):
    options = {"shard__param_dtype": "bfloat16", "shard__activation_checkpointing": "full"}
    run_job(tmp_path / "run", train__steps=20, optim__lr=0.01, **options)
    rows = read_rows(tmp_path / "run")
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]


@on_ranks(2)
def test_wires_train_and_continue_alike(rank, tmp_path):
    """What is saved is exact, so a run that was stopped goes on as if it had not been; its losses
    are near those without a wire.
    """
    wire = {"shard__gather_wire": "int8", "shard__reduce_wire": "bf16"}
    run_job(tmp_path / "whole", **wire)
    run_job(tmp_path / "parts", stop_after=3, **wire)
    run_job(tmp_path / "parts", **wire)
    run_job(tmp_path / "exact", shard__transport="c10d")
    assert results(tmp_path / "parts") == results(tmp_path / "whole")
    whole, exact = ([row["loss"] for row in read_rows(tmp_path / n)] for n in ("whole", "exact"))
    assert whole != exact and whole == pytest.approx(exact, rel=0.01)


@on_ranks(2)
def test_a_finished_run_says_so_and_can_be_prolonged(rank, tmp_path):
    run = tmp_path / "run"
    run_job(run)
    before = snapshot(run)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        run_job(run)
    assert snapshot(run) == before
    expected = "is complete: step 8 of 8 (val_loss"
    assert (expected in shown.getvalue()) if rank == 0 else not shown.getvalue()
    with pytest.raises(ConfigError, match=r"run\.seed was 0, now 1"):
        run_job(run, run__seed=1)
    run_job(run, train__steps=10)
    assert [row["step"] for row in read_rows(run)] == list(range(1, 11))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"model__dim": 64},
            "of another shape: blocks.0.attention.key.weight (32, 32) -> (64, 64)",
        ),
        ({"model__layers": 1}, "unknown to the model: blocks.1."),
        ({"model__layers": 3}, "missing from the checkpoint: blocks.2."),
        ({"run__seed": 1}, "other data or in another order"),
        ({"data__seq_len": 16}, "other data or in another order"),
        ({"checkpoint__resume": "off"}, "holds checkpoints"),
        ({"train__micro_batch": 5}, "train.global_batch: 12 is not a multiple of 2 ranks"),
        (
            {"shard__unit": "Blockk"},
            "shard.unit: nothing in Decoder has the class or name 'Blockk'",
        ),
        ({"mesh__shard": 3}, "--mesh.shard: 1 replica x 3 shards are 3 ranks"),
    ],
)
@on_ranks(2)
def test_what_cannot_continue_is_refused_and_left_alone(rank, tmp_path, change, expected):
    run = tmp_path / "run"
    run_job(run, stop_after=2)
    before = snapshot(run)
    with refused() as caught:
        run_job(run, **change)
    assert expected in str(caught.value)
    dist.barrier()
    assert snapshot(run) == before


@on_ranks(2)
def test_start_from_a_named_checkpoint(rank, tmp_path):
    run_job(tmp_path / "first", stop_after=4)
    source = tmp_path / "first/checkpoints/step_00000004"
    run_job(tmp_path / "second", checkpoint__resume=source)
    assert [row["step"] for row in read_rows(tmp_path / "second")] == [5, 6, 7, 8]
    with refused() as caught:
        run_job(tmp_path / "third", checkpoint__resume=tmp_path / "first")
    assert "incomplete (no manifest.json)" in str(caught.value)
    assert not (tmp_path / "third").exists()
    before = snapshot(tmp_path / "second")
    with refused() as caught:  # also where the run is complete and would not need it
        run_job(tmp_path / "second", checkpoint__resume="/nope")
    assert "checkpoint.resume: /nope: no such directory" in str(caught.value)
    dist.barrier()
    assert snapshot(tmp_path / "second") == before


@on_ranks(2)
def test_saves_in_the_background_are_the_same(rank, tmp_path):
    run_job(tmp_path / "whole", checkpoint__every=2)
    run = tmp_path / "run"
    run_job(run, checkpoint__every=2, checkpoint__background=True, stop_after=5)
    run_job(run, checkpoint__every=2, checkpoint__background=True)
    assert results(run) == results(tmp_path / "whole")
    name = f"checkpoints/step_00000008/rank_{rank:05d}.safetensors"
    assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@on_ranks(2)
def test_a_failed_save_in_the_background_ends_all_ranks_at_one_step(rank, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    options = {"checkpoint__background": True, "checkpoint__rehearsal": False}
    run = tmp_path / "run"
    if rank == 1:
        monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(
        CheckpointError, match=r"step 2 could not be written.*rank 1.*No space left"
    ):
        run_job(run, checkpoint__every=2, train__steps=200, train__eval_every=100, **options)
    monkeypatch.undo()
    dist.barrier()
    assert checkpoint_names(run) == []
    run_job(run, checkpoint__every=2, **options)
    assert checkpoint_names(run) == ["step_00000006", "step_00000008"]


@on_ranks(2)
def test_the_rehearsal_finds_a_full_disk_after_the_first_step(rank, tmp_path, monkeypatch):
    """Also one that would fill up only with the checkpoints that are to stay."""
    run, real = tmp_path / "run", os.statvfs(tmp_path)

    def left(num_bytes):
        values = list(real)
        values[:5] = [1, 1, num_bytes, num_bytes, num_bytes]
        return lambda path: os.statvfs_result(values)

    for free, said in ((1000, "1,000 are free"), (1_000_000, "up to 3 stand at once")):
        monkeypatch.setattr(os, "statvfs", left(free))
        with pytest.raises(CheckpointError, match=said) as caught:
            run_job(run, checkpoint__every=4)
        assert "make room" in explain(caught.value)  # so it is not tried again
        dist.barrier()
        assert [row["step"] for row in read_rows(run)] == [1]
        assert checkpoint_names(run) == []
    monkeypatch.undo()
    dist.barrier()
    run_job(run, checkpoint__every=4)
    assert checkpoint_names(run) == ["step_00000004", "step_00000008"]


@on_ranks(2)
def test_a_directory_in_use_is_refused(rank, tmp_path, monkeypatch):
    original = RunDir.lock
    monkeypatch.setattr(RunDir, "lock", lambda self: original(self, patience_s=0.2))
    run = tmp_path / "run"
    run_job(run, stop_after=2)
    dist.barrier()
    descriptor = os.open(run, os.O_RDONLY)
    if rank == 0:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    dist.barrier()
    with refused() as caught:
        run_job(run)
    assert "in use by another job" in str(caught.value)
    os.close(descriptor)
    dist.barrier()
    run_job(run)


def test_where_directories_cannot_be_locked_a_file_is(tmp_path, monkeypatch):
    original = fcntl.flock

    def flock(descriptor, how):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "no lock of a directory")
        original(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    config = load_config(None, [("run.dir", str(tmp_path))]).config
    first, second = RunDir(config), RunDir(config)
    first.lock()
    with refused() as caught:
        second.lock(patience_s=0.0)
    assert f"in use by another job (process {os.getpid()})" in str(caught.value)
    first.unlock()
    second.unlock()
    second.lock(patience_s=0.0)
    second.unlock()


def test_a_lock_dies_with_its_owner_though_a_child_of_it_lives(tmp_path):
    """Workers of a data loader may outlive a rank that was killed with -9."""
    config = load_config(None, [("run.dir", str(tmp_path))]).config
    child, parent = os.pipe()
    owner = os.fork()
    if not owner:
        RunDir(config).lock()
        worker = os.fork()
        if not worker:
            time.sleep(60)
            os._exit(0)
        os.write(parent, f"{worker}\n".encode())
        time.sleep(60)
        os._exit(0)
    worker = int(os.read(child, 20))
    try:
        with refused():
            RunDir(config).lock(patience_s=0.0)
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        after = RunDir(config)
        after.lock(patience_s=0.5)
        after.unlock()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_job_that_came_and_went_while_this_one_started(tmp_path):
    """What was looked for before the directory was there may be in it now."""
    config = load_config(None, [("run.dir", str(tmp_path / "run"))]).config
    late, early = RunDir(config), RunDir(config)
    late.lock()
    early.create()
    early.config_file.write_text("")
    early.unlock()
    with refused() as caught:
        late.create()
    assert "another job has begun in" in str(caught.value)
    late.unlock()
    late.lock()
    late.create()  # it knew of it
    late.unlock()


MODELS = """
import os
import torch
from torch import nn

class Line(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.scale = scale

    def forward(self, batch):
        x, y = batch
        return ((self.layer(x.float()).squeeze(-1) - y) ** 2).mean() * self.scale

def datasets(options):
    make = lambda start, n: [
        (torch.tensor([i % 5, i % 3, i % 2, 1]), float(i % 5)) for i in range(start, start + n)
    ]
    return make(0, 60), make(60, 20)

def build(options):
    assert options == {"scale": 2}, options
    return Line(**options)

def explode(options):
    return Line(float("inf"))

def no_module(options):
    return 3

def no_loss(options):
    model = nn.Linear(4, 1)
    model.forward = lambda batch: batch
    return model
"""


@on_ranks(2)
def test_a_user_model_and_its_errors(rank, tmp_path):
    config = tmp_path / "job.toml"
    if rank == 0:
        (tmp_path / "my_models.py").write_text(MODELS)
        config.write_text(
            '[model]\nkind = "my_models:build"\nscale = 2\n'
            '[data]\nsource = "my_models:datasets"\n'
            "[train]\nsteps = 30\nglobal_batch = 20\nmicro_batch = 5\neval_every = 10\n"
            "[optim]\nlr = 0.1\nweight_decay = 0.0\n"
        )
    dist.barrier()
    run_job(tmp_path / "run", config_file=config)
    rows = read_rows(tmp_path / "run")
    assert rows[-1]["val_loss"] < 0.3 * rows[9]["val_loss"]
    assert rows[-1]["samples_per_s"] > 0
    with pytest.raises(TrainingError, match="step 1: the loss is inf; the step was not taken"):
        run_job(tmp_path / "run2", config_file=config, model__kind="my_models:explode")
    with refused() as caught:
        run_job(tmp_path / "run3", config_file=config, model__kind="my_models:no_module")
    assert "must return an nn.Module, got int" in str(caught.value)
    with refused() as caught:
        run_job(tmp_path / "run4", config_file=config, model__kind="my_models:no_loss")
    assert "Linear must return its loss (one number)" in str(caught.value)


@on_ranks(2)
def test_convnet_example_learns_and_continues_alike(rank, tmp_path):
    """Batch norm's statistics are averaged over the ranks, so one copy in the checkpoint is
    enough."""
    options = {"config_file": EXAMPLES / "convnet.toml", "train__steps": 40}
    run_job(tmp_path / "whole", **options)
    rows = read_rows(tmp_path / "whole")
    assert rows[-1]["val_accuracy"] > 0.5
    run_job(tmp_path / "parts", stop_after=13, **options)
    run_job(tmp_path / "parts", **options)
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


@on_ranks(2)
def test_a_disk_that_fills_ends_the_job_and_keeps_what_was_there(rank, tmp_path, monkeypatch):
    run = tmp_path / "run"
    run_job(run, stop_after=2)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if rank == 1:
        monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(CheckpointError) as caught:
        run_job(run)
    assert "could not be written" in str(caught.value)
    assert "No space left on device" in str(caught.value)
    monkeypatch.undo()
    dist.barrier()
    assert "step_00000002" in checkpoint_names(run)
    assert "step_00000008" not in checkpoint_names(run)
    run_job(run)
    assert checkpoint_names(run) == ["step_00000002", "step_00000008"]
