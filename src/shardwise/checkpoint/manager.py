"""Saves and loads a run: model, optimizers, schedule, position, random state, in one transaction.

    manager = CheckpointManager("run/checkpoints", keep=2)
    manager.save(step, model, optimizer, scheduler=scheduler, extra={"position": 4096})
    found, skipped = manager.latest()
    if found is not None:
        loaded = manager.load(found, model, optimizer, scheduler=scheduler)

Methods that save or load are collective; an error of one rank is raised on all. With
`background=True` a save copies this rank's shards and goes on in a thread; what goes wrong there is
raised by the next `save`, `wait`, `close` or `check`. Random state continues only on the same
number of ranks: on another one there is no meaningful mapping of streams to ranks, and the caller
seeds anew (`Loaded.rng_restored`).
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch_compat import local_of, new_dtensor, spec_of
from shardwise.checkpoint import store
from shardwise.checkpoint.files import free_bytes
from shardwise.checkpoint.hosts import Hosts
from shardwise.checkpoint.loading import check_model, load_model, load_optimizers
from shardwise.checkpoint.placement import local_part
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.rng import restore_rng
from shardwise.checkpoint.source import CheckpointSource, Source, read_whole
from shardwise.checkpoint.stages import StageSource, joined, names_elsewhere
from shardwise.checkpoint.state import EXTRA, RNG, SCHEDULER, Optimizers, State, as_list
from shardwise.checkpoint.store import Checkpoint
from shardwise.checkpoint.writing import write_state
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.offload import OffloadedOptimizer


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came with the tensors."""

    step: int
    extra: dict[str, Any]
    rng_restored: bool


class CheckpointManager:
    """The checkpoints of one directory: `step_%08d` in it.

    Args:
        directory: made when the first checkpoint is saved.
        ranks: who saves together; by default all ranks of the job.
        keep: how many complete checkpoints stay; 0 keeps all.
        background: write in a thread, from a copy of this rank's shards.
        stages: each rank's model is a stage of a pipeline, with the names that its parameters have
            in the whole model. What all stages hold together is one checkpoint, which any other
            cut into stages loads, and (without `stages`) a model that is not cut.
    """

    def __init__(
        self,
        directory: Path | str,
        ranks: Ranks | None = None,
        *,
        keep: int = 0,
        background: bool = False,
        stages: bool = False,
    ) -> None:
        self.directory, self._keep = Path(directory), keep
        self._ranks = ranks if ranks is not None else Ranks.of_job()
        self._stages = stages
        self._background: _Background | None = None
        if background:
            # Collectives of two threads must not mix: a group of its own.
            self._background = _Background(self._ranks.separate())

    # -- finding ---------------------------------------------------------------------------------
    def latest(self, at_least: int = 0) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint, of step `at_least` or later, whose contents are whole, and why
        newer directories were passed over."""
        listing = self._ranks.on_rank0(lambda: store.list_checkpoints(self.directory))
        first = store.step_name(at_least)
        messages = {name: text for name, text in listing.skipped if name >= first}
        for checkpoint in listing.complete:
            if checkpoint.step < at_least:
                break
            name, damaged = checkpoint.path.name, self.verify(checkpoint)
            if not damaged:
                return checkpoint, [text for n, text in messages.items() if n > name]
            messages[name] = "; ".join(damaged)
        return None, list(messages.values())

    def open(self, path: Path | str) -> Checkpoint:
        """The checkpoint at a path that the user named; CheckpointError if it is not whole."""
        checkpoint = self._ranks.on_rank0(lambda: store.read_checkpoint(Path(path)))
        if damaged := self.verify(checkpoint):
            raise self._ranks.agreed(CheckpointError("; ".join(damaged)))
        return checkpoint

    def verify(self, checkpoint: Checkpoint) -> list[str]:
        """Reads all contents, each rank a part of the blocks; what is damaged."""
        rank, count = self._ranks.rank, self._ranks.world_size
        parts = self._ranks.on_all(lambda: store.verify(checkpoint, part=rank, num_parts=count))
        return sorted({text for part in parts for text in part})

    # -- saving ----------------------------------------------------------------------------------
    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Optimizers = None,
        *,
        scheduler: Any = None,
        extra: dict[str, Any] | None = None,
    ) -> Path:
        """Saves the checkpoint of `step`, then deletes the oldest beyond `keep`.

        Returns its path, where it stands on return unless `background`.
        """
        self.wait()
        rank = self._ranks.rank
        if self._background is not None:
            _check_copies(optimizers)
        state = self._ranks.on_each(lambda: State.of_run(rank, model, optimizers, scheduler, extra))
        if self._stages:
            state = joined(state, model, self._ranks)
        final = self.directory / store.step_name(step)
        if self._background is None:
            return _write(state, final, step, self._ranks, self._keep)
        copied = self._ranks.on_each(lambda: _copied(state))
        self._background.start(copied, final, step, self._keep)
        return final

    def rehearse(
        self,
        step: int,
        model: nn.Module,
        optimizers: Optimizers = None,
        *,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """A save as later ones will be, verified and taken away again: permissions, space and
        state that cannot be saved show now and not after hours."""
        rank = self._ranks.rank
        state = self._ranks.on_each(lambda: State.of_run(rank, model, optimizers, None, extra))
        if self._stages:
            state = joined(state, model, self._ranks)
        final = self.directory / f".rehearsal_{store.step_name(step)}"
        try:
            path = write_state(state, final, step, Hosts.sharing_all(self._ranks))
            written = self._ranks.on_rank0(lambda: store.read_checkpoint(path))
            if damaged := self.verify(written):
                text = f"the disk of {self.directory} gives back other bytes: {'; '.join(damaged)}"
                raise self._ranks.agreed(CheckpointError(text))
            self._ranks.on_rank0(lambda: self._check_room(written.size_bytes))
        finally:
            if self._ranks.rank == 0:
                store.discard(final)

    def _check_room(self, size_bytes: int) -> None:
        """Room for what `keep` will let stand, and the one that is written beside them. The
        rehearsal still stands, so one of them is there."""
        have = len(store.list_checkpoints(self.directory).complete) + 1
        free, needed = free_bytes(self.directory), size_bytes * (self._keep + 1 - have)
        if self._keep and needed > free:
            raise CheckpointError(
                f"{self.directory}: a checkpoint has {size_bytes:,} bytes, and up to "
                f"{self._keep + 1} stand at once; that takes {needed:,} bytes more and {free:,} "
                "are free on the disk; free some, or lower checkpoint.keep"
            )

    # -- background ------------------------------------------------------------------------------
    def check(self) -> CheckpointError | None:
        """The error of a save in the background that has failed on this rank, without waiting.
        Other ranks may learn of it a moment later: agree on it before raising."""
        return self._background.error if self._background is not None else None

    def wait(self) -> None:
        """Waits for the save in the background, and raises what went wrong in it."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """As `wait`, at the end of a run."""
        self.wait()

    # -- loading ---------------------------------------------------------------------------------
    def load(
        self,
        checkpoint: Checkpoint,
        model: nn.Module,
        optimizers: Optimizers = None,
        *,
        scheduler: Any = None,
        options: bool = True,
    ) -> Loaded:
        """Fills model, optimizers, schedule and random state, whatever number of ranks and
        strategy wrote them. Contents are verified as they are read.

        Args:
            options: learning rates and so on come from the checkpoint; else they stay.
        """
        elsewhere = names_elsewhere(model, self._ranks) if self._stages else set[str]()
        return self._ranks.on_each(
            lambda: self._load(checkpoint, model, optimizers, scheduler, options, elsewhere)
        )

    def _load(
        self,
        checkpoint: Checkpoint,
        model: nn.Module,
        optimizers: Optimizers,
        scheduler: Any,
        options: bool,
        elsewhere: set[str],
    ) -> Loaded:
        whole = CheckpointSource(checkpoint)
        source = StageSource(whole, elsewhere) if elsewhere else whole
        try:
            check_model(source, model)
            if optimizers is not None:
                load_optimizers(source, model, optimizers, options=options)
            load_model(source, model)
            if scheduler is not None:
                scheduler.load_state_dict(_required(source, SCHEDULER))
            rng = {}
            if checkpoint.world_size == self._ranks.world_size:
                prefix = f"{RNG}{self._ranks.rank}."
                keys = [k for k in source.tensors if k.startswith(prefix)]
                rng = {k.removeprefix(prefix): read_whole(source, k) for k in keys}
            if rng:
                restore_rng(rng)
            return Loaded(checkpoint.step, dict(source.objects.get(EXTRA, {})), bool(rng))
        finally:
            source.close()


def _required(source: Source, key: str) -> Any:
    if key not in source.objects:
        raise CheckpointError(f"{source.path}: holds no {key}; it was saved without one")
    return source.objects[key]


def read_extra(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the caller of `save` passed as `extra`."""
    source = CheckpointSource(checkpoint)
    source.close()
    return dict(source.objects.get(EXTRA, {}))


def _write(state: State, final: Path, step: int, ranks: Ranks, keep: int) -> Path:
    path = write_state(state, final, step, Hosts.sharing_all(ranks))
    ranks.on_rank0(lambda: store.prune(final.parent, keep))
    return path


@torch.no_grad()
def _copied(state: State) -> State:
    """The state of this moment, on the CPU: training goes on while it is written."""
    tensors = {}
    for key, tensor in state.tensors.items():
        if key in state.pieces:
            flat = torch.cat([piece.clone() for piece in state.pieces[key]()])
            held = flat.view(local_part(tensor, key)[0].shape)
            tensors[key] = held
            if isinstance(tensor, DTensor):
                tensors[key] = new_dtensor(DTensor, held, spec_of(tensor))
        elif isinstance(tensor, DTensor):
            local = local_of(tensor).detach()
            kept = local.to("cpu", copy=True)
            tensors[key] = new_dtensor(DTensor, kept, spec_of(tensor))
        else:
            tensors[key] = tensor.detach().to("cpu", copy=True)
    objects = copy.deepcopy(state.objects)
    return State(tensors, ties=dict(state.ties), objects=objects, is_stage=state.is_stage)


def _check_copies(optimizers: Optimizers) -> None:
    for optimizer in as_list(optimizers):
        if isinstance(optimizer, OffloadedOptimizer) and optimizer.place == "nvme":
            raise CheckpointError(
                "background=True would copy the optimizer's state from its files into memory; save "
                "in the foreground, which reads it piece by piece"
            )


class _Background:
    """One save at a time in a thread, with ranks (a process group) of its own."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._thread: threading.Thread | None = None
        self.error: CheckpointError | None = None

    def start(self, state: State, final: Path, step: int, keep: int) -> None:
        def run() -> None:
            try:
                _write(state, final, step, self._ranks, keep)
            except ShardwiseError as error:
                self.error = CheckpointError(str(error))
            except Exception as error:  # noqa: BLE001 - raised by `wait`
                text = f"the checkpoint of step {step} could not be written: {error}"
                self.error = CheckpointError(text)

        # Not a daemon: the interpreter waits for a save that is under way.
        self._thread = threading.Thread(target=run, name=f"save of step {step}")
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (error := self.error) is not None:
            self.error = None
            raise error
