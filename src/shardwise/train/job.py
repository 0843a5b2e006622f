"""Puts a job together: data, model, starting point, optimizer, run directory; checks before the
first write."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

import shardwise
from shardwise import step_in_backward
from shardwise.checkpoint import store
from shardwise.checkpoint.files import replace_file
from shardwise.checkpoint.manager import CheckpointManager
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.rng import seed_rng
from shardwise.errors import TrainingError
from shardwise.offload import OffloadedOptimizer
from shardwise.replicas.member import StoppedError
from shardwise.train import numerics
from shardwise.train.best import Best
from shardwise.train.config import Config, HFModelConfig, resolved_strategy
from shardwise.train.config_checks import world_problems
from shardwise.train.config_file import LoadedConfig, config_as_dict, config_as_toml
from shardwise.train.console import Console
from shardwise.train.data import Data, open_data
from shardwise.train.hf.room import room_on
from shardwise.train.hosts import Host, describe_mesh, find_hosts, host_problems
from shardwise.train.link import find_link
from shardwise.train.loop import is_over, peak_memory_bytes, run_steps
from shardwise.train.memory import find_copies, keep_copies
from shardwise.train.metrics import MetricsFile, read_metrics
from shardwise.train.model import (
    build_model,
    fill,
    memory_notes,
    model_notes,
    shard,
    take_tokenizer,
)
from shardwise.train.optimizer import build_optimizer, way_of
from shardwise.train.optimizer_state import bring_to_dtype
from shardwise.train.record import Record, Warned, start_facts
from shardwise.train.replica import Replica
from shardwise.train.resume import find_start
from shardwise.train.run_dir import RunDir, check_named, finished
from shardwise.train.running import Job
from shardwise.train.speed import device_peak, flops_per_token
from shardwise.train.stop import StopRequest
from shardwise.train.tensor_axis import DataRanks
from shardwise.train.text.check import check_packing, check_sizes
from shardwise.train.trackers import Run, Trackers
from shardwise.train.watch import Watch
from shardwise.units import counted


def train(loaded: LoadedConfig, ranks: Ranks, device: torch.device, stop: StopRequest) -> None:
    """Runs the whole job; every rank calls it. ConfigError if it cannot start, with nothing
    written."""
    loaded = loaded.on(ranks.world_size)
    config = loaded.config
    for key, text in world_problems(config, ranks.world_size):
        raise ranks.agreed(loaded.error(key, text))
    hosts = find_hosts(ranks)
    for key, text in host_problems(config, hosts):
        raise ranks.agreed(loaded.error(key, text))
    run_dir = RunDir(config)
    try:
        ranks.on_rank0(run_dir.check)
        ranks.on_rank0(run_dir.lock)
        ranks.on_rank0(lambda: check_named(config))
        if done := ranks.on_rank0(lambda: finished(config)):
            if ranks.rank == 0:
                print(done, flush=True)
            _end_well(config, ranks)
        else:
            job, notes = build_job(loaded, ranks, device, stop, run_dir)
            _run(job, hosts, notes)
    except StoppedError as error:
        if ranks.rank == 0:
            print(f"{error}; start again to go on", flush=True)
    finally:
        run_dir.unlock()


def _end_well(config: Config, ranks: Ranks) -> None:
    """A run that is complete may have been killed before its model was written."""
    if not isinstance(config.model, HFModelConfig):
        return
    from shardwise.train.hf.export import export_left

    said = ranks.on_rank0(lambda: export_left(config), "writing the model for others")
    if said and ranks.rank == 0:
        print(said, flush=True)


def _on_host_anyway(job: Job) -> list[str]:
    """What [offload] asks for in vain."""
    if job.device.type != "cpu":
        return []
    found = {"optimizer": "the state is", "parameters": "they are"}
    return [
        f"offload.{key} = 'cpu': on CPU {what} in host memory anyway"
        for key, what in found.items()
        if getattr(job.config.offload, key) == "cpu"
    ]


def _run(job: Job, hosts: tuple[Host, ...], notes: list[str]) -> None:
    job.link = find_link(job.config, hosts, job.ranks, job.device)
    mesh = describe_mesh(job.config, hosts)
    if job.record is not None and len(hosts) > 1:
        job.record.event("hosts", hosts=[asdict(host) for host in hosts])
    for note in [_describe(job), *([mesh] if mesh else []), *notes, *_on_host_anyway(job)]:
        job.console.say(note)
    job.console.start(job.step)
    try:
        with Warned(RunDir(job.config).path, job.ranks.rank):
            end = run_steps(job)
        if job.replica is not None:
            job.replica.leave(in_order=True)
        if job.copies is not None:
            job.copies.clear()
        _note_end(job, end, is_well=True)
        if is_over(job):
            _export(job)
    except TrainingError as error:
        if job.copies is not None:  # to go on from just before would end alike
            job.copies.clear()
        _note_end(job, str(error), is_well=False)
        raise
    except Exception as error:
        _note_end(job, f"{type(error).__name__}: {error}", is_well=False)
        raise
    finally:
        if job.replica is not None:
            job.replica.leave(in_order=False)
        if isinstance(job.optimizer, OffloadedOptimizer):
            job.optimizer.close()
        if job.record is not None:
            job.record.close()
        job.console.stop()
        if job.metrics is not None:
            job.metrics.close()
        job.trackers.close()
    job.console.say(f"{end} ({job.config.run.dir})")


def _note_end(job: Job, text: str, *, is_well: bool) -> None:
    if job.record is not None:
        job.record.step = job.step
        job.record.event("end", ok=is_well, text=text)


def _export(job: Job) -> None:
    """What others load, from the last checkpoint; for models that others know."""
    config = job.config
    if not isinstance(config.model, HFModelConfig) or not config.checkpoint.export:
        return
    from shardwise.train.hf.export import export_at_end

    run = RunDir(config)
    say = job.console.say
    job.ranks.on_rank0(
        lambda: export_at_end(run.checkpoints, run.model, say), "writing the model for others"
    )
    job.console.say(f"the model is in {run.model}")


def build_job(
    loaded: LoadedConfig, ranks: Ranks, device: torch.device, stop: StopRequest, run_dir: RunDir
) -> tuple[Job, list[str]]:
    """A job at its starting point (zero, or a checkpoint), and what to tell about that. Collective;
    `train` has checked the configuration and locked the directory before."""
    config, search_dir = loaded.config, loaded.path.parent if loaded.path else None
    numerics.set_up(config)
    data = ranks.on_each(lambda: open_data(config, search_dir), "preparing the data")
    numerics.check_data(config, data, ranks)
    before = ranks.gather_floats([peak_memory_bytes(device), room_on(device)])
    model = ranks.on_each(lambda: build_model(config, search_dir), "building the model")
    fused = config.run.reproducible != "any_world" or device.type != "cpu"
    ranks.on_each(lambda: way_of(model, config.optim, device, fused=fused))
    ranks.on_each(lambda: _check_data(loaded, data, model))
    manager = CheckpointManager(
        run_dir.checkpoints,
        ranks,
        keep=config.checkpoint.keep,
        background=config.checkpoint.background,
    )
    copies = find_copies(run_dir, ranks)
    start, copies, found = find_start(config, manager, copies, ranks, data, model, device)
    notes = [*loaded.notes, *model_notes(model, config), *data.notes, *found]
    notes += take_tokenizer(model, config, ranks)
    notes += ranks.on_rank0(lambda: _changed(config, run_dir)) if start is not None else []
    notes += ranks.on_each(lambda: memory_notes(model, config, ranks.world_size, device))
    shard(model, config, device, ranks.world_size)
    ranks.on_each(
        lambda: fill(model, config, device, is_resumed=start is not None), "reading the weights"
    )
    optimizer = ranks.on_each(
        lambda: build_optimizer(model, config.optim, fused=fused, whole=config)
    )
    if config.optim.in_backward:
        step_in_backward(model, optimizer)
    ranks.on_each(lambda: numerics.check(config, model, optimizer))
    step, position, loss = 0, 0, None
    seed_rng(config.run.seed, step, DataRanks.of(config, ranks).rank)
    if start is not None:
        if copies is not None:
            copies.bring(start, model)
        # Learning rate and decay are configuration: a changed one takes effect.
        restored = manager.load(start, model, optimizer, options=False)
        bring_to_dtype(optimizer, config.optim)
        step, position = start.step, restored.extra["position"]
        loss = restored.extra.get("loss")
        where = f"memory at step {step}: " if copies is not None else ""
        notes.append(f"continuing from {where}{start.path}")
        if not restored.rng_restored and config.run.reproducible != "any_world":
            seed_rng(config.run.seed, step, DataRanks.of(config, ranks).rank)
            notes.append(
                f"written by {counted(start.world_size, 'rank')}, now {ranks.world_size}: random "
                "streams (dropout) start anew, everything else continues"
            )
    if isinstance(config.model, HFModelConfig):
        from shardwise.train.hf.trial import check_forward

        check_forward(data, model, ranks, device)
    notes += check_packing(config, data, model, ranks, device)
    tokenizer = ranks.on_each(lambda: _tokenizer_of_samples(config))
    replica = Replica.joined(config, model, ranks, stop, notes)
    best = ranks.on_rank0(lambda: _best_so_far(run_dir, step))
    ranks.on_rank0(lambda: _open_run_dir(config, run_dir, best))
    console = Console(
        total_steps=config.train.steps, line_every=config.log.every, silent=ranks.rank != 0
    )
    trackers = Trackers(console.say)
    if ranks.rank == 0:
        trackers.open(config.log.trackers, Run(run_dir.path, step, config_as_dict(config)))
    job = Job(
        config=config,
        ranks=ranks,
        device=device,
        data=data,
        model=model,
        optimizer=optimizer,
        checkpoints=manager,
        copies=keep_copies(config, run_dir, ranks, copies),
        metrics=MetricsFile(run_dir.metrics_file, step) if ranks.rank == 0 else None,
        console=console,
        stop=stop,
        trackers=trackers,
        best=best,
        watch=Watch(device),
        record=_open_record(run_dir, step, model, device, ranks, before, notes),
        best_checkpoints=CheckpointManager(run_dir.best, ranks, keep=1)
        if config.checkpoint.best
        else None,
        tokenizer=tokenizer,
        mfu_per_hz=_mfu_per_hz(config, data, model, device, ranks),
        step=step,
        position=position,
        loss=loss,
        replica=replica,
        saved_step=step if copies is None else 0,
    )
    return job, notes


def _changed(config: Config, run_dir: RunDir) -> list[str]:
    changed = run_dir.changed_keys(config)
    return [f"changed since the run began: {', '.join(changed)}"] if changed else []


def _check_data(loaded: LoadedConfig, data: Data, model: torch.nn.Module) -> None:
    check_sizes(data, model)
    _check_held_out(loaded, data)


def _check_held_out(loaded: LoadedConfig, data: Data) -> None:
    config = loaded.config
    wanted = {"train.patience": config.train.patience, "checkpoint.best": config.checkpoint.best}
    wanted["train.eval_at_start"] = config.train.eval_at_start
    for key in (key for key, value in wanted.items() if value and data.held_out is None):
        raise loaded.error(key, "needs val_loss, but the data has no held-out part")


def _tokenizer_of_samples(config: Config) -> Any:
    if not config.log.samples:
        return None
    from shardwise.train.text.tokenizer import find_tokenizer, load_tokenizer

    return load_tokenizer(find_tokenizer(config), needs_template=False)


def _best_so_far(run_dir: RunDir, step: int) -> Best:
    return Best.of_rows(r for r in read_metrics(run_dir.metrics_file) if r["step"] <= step)


def _mfu_per_hz(
    config: Config, data: Data, model: torch.nn.Module, device: torch.device, ranks: Ranks
) -> float | None:
    """A step's share of what all devices compute in a second; None where that is not known."""
    peak = device_peak(device, config.shard.param_dtype)
    if peak is None or data.unit == "sample":
        return None
    tokens = config.train.global_batch * data.units_per_sample
    return flops_per_token(model) * tokens / (peak * ranks.world_size)


def _open_run_dir(config: Config, run_dir: RunDir, best: Best) -> None:
    run_dir.create()
    store.clean(run_dir.checkpoints)
    for kept in store.list_checkpoints(run_dir.best).complete:
        if kept.step != best.step:  # of steps that are done again
            store.discard(kept.path)
    replace_file(run_dir.config_file, config_as_toml(config).encode())


def _open_record(
    run_dir: RunDir,
    step: int,
    model: torch.nn.Module,
    device: torch.device,
    ranks: Ranks,
    memory: torch.Tensor,
    notes: list[str],
) -> Record | None:
    """On rank 0, with a row for this start; `memory`: bytes used and free before the model."""
    if ranks.rank != 0:
        return None
    record = Record(run_dir.path, step, ranks.world_size)
    facts = start_facts(model, device, ranks.world_size)
    facts |= {"base_bytes": int(memory[:, 0].max()), "room_bytes": int(memory[:, 1].min())}
    record.event("start", **facts, notes=notes)
    return record


def _describe(job: Job) -> str:
    config, data = job.config, job.data
    parameters = sum(p.numel() for p in job.model.parameters())
    held_out = len(data.held_out) if data.held_out is not None else 0
    sequences = (
        "samples" if data.unit == "sample" else f"sequences of {data.units_per_sample} {data.unit}s"
    )
    threads = (
        f", {counted(torch.get_num_threads(), 'thread')} each" if job.device.type == "cpu" else ""
    )
    promise = f", reproducible ({level})" if (level := config.run.reproducible) != "off" else ""
    return (
        f"shardwise {shardwise.__version__}: {counted(job.ranks.world_size, 'rank')} on "
        f"{job.device.type}{threads}, {resolved_strategy(config)}, {config.shard.param_dtype}"
        f"{promise}\n"
        f"model {config.model.kind}: {parameters:,} parameters; "
        f"data: {len(data.train):,} {sequences}, {held_out:,} held out"
    )
