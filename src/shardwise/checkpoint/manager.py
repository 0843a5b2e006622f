"""Saves and loads model, optimizer, random state and the job's own facts, atomically.

    step_%08d/  *.distcp, .metadata   torch.distributed.checkpoint (DCP): tensors under their names
                job.json              what the caller passed as `facts` (position, configuration)
                manifest.json         last: sizes and checksums of all the others

Keys: `model.<name>`, `optim.<name>.<slot>`, `rng.<rank>.<kind>`. DCP lays tensors out for any world
size. The optimizer's options (learning rate, decay) are configuration, not state: they are not
saved, so that a changed one takes effect. All methods are collective; an error of one rank is
raised on all of them. Random state continues only on the same world size: on another one there is
no meaningful mapping of streams to ranks, and the caller seeds anew (`Loaded.rng_restored` says
so).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwise.checkpoint import store
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.rng import capture_rng, restore_rng
from shardwise.checkpoint.store import Checkpoint
from shardwise.errors import CheckpointError

_FACTS = "job.json"


@dataclass(frozen=True, slots=True)
class Loaded:
    facts: dict[str, Any]
    rng_restored: bool


class CheckpointManager:
    """The checkpoints of one run directory."""

    def __init__(self, directory: Path, ranks: Ranks, *, keep: int = 0) -> None:
        self.directory, self._ranks, self._keep = directory, ranks, keep

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint whose contents are whole, and why newer directories were passed
        over."""
        listing = self._ranks.on_rank0(lambda: store.list_checkpoints(self.directory))
        messages = dict(listing.skipped)
        for checkpoint in listing.complete:
            name, damaged = checkpoint.path.name, self._damaged_files(checkpoint)
            if not damaged:
                return checkpoint, [text for n, text in messages.items() if n > name]
            messages[name] = f"{checkpoint.path}: damaged ({', '.join(damaged)}: wrong checksum)"
        return None, list(messages.values())

    def open(self, path: Path) -> Checkpoint:
        """The checkpoint at a path that the user named; CheckpointError if it is not whole."""
        checkpoint = self._ranks.on_rank0(lambda: _read(path))
        if damaged := self._damaged_files(checkpoint):
            raise CheckpointError(f"{path}: damaged ({', '.join(damaged)}: wrong checksum)")
        return checkpoint

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]
    ) -> Path:
        """Writes the checkpoint of `step`, then deletes the oldest beyond `keep`. Returns its
        path."""
        saving = self._ranks.on_rank0(lambda: store.begin(self.directory, step))
        state = _collect(model, optimizer)
        state.update({f"rng.{self._ranks.rank}.{k}": v for k, v in capture_rng().items()})
        writer = dcp.FileSystemWriter(saving, single_file_per_rank=True, sync_files=True)
        try:
            dcp.save(state, storage_writer=writer, process_group=self._ranks.group)
            own = list(saving.glob(f"__{self._ranks.rank}_*.distcp"))
            entries = self._ranks.on_all(lambda: store.describe_files(own))
        except (Exception, CheckpointException) as error:  # DCP's own is no Exception
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.directory}: "
                f"{_root_cause(error)}; earlier checkpoints are untouched"
            ) from error
        return self._ranks.on_rank0(lambda: self._finish(saving, step, facts, entries))

    def _finish(
        self, saving: Path, step: int, facts: dict[str, Any], entries: list[dict[str, Any]]
    ) -> Path:
        store.write_synced(saving / _FACTS, json.dumps(facts, indent=1).encode())
        files = store.describe_files([saving / _FACTS, saving / ".metadata"])
        for entry in entries:
            files.update(entry)
        final = store.commit(saving, step, self._ranks.world_size, files)
        store.prune(self.directory, self._keep)
        return final

    def load(
        self, checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Loaded:
        """Reads a checkpoint into model and optimizer, whatever world size wrote it."""
        metadata = _metadata(checkpoint)
        saved = metadata.state_dict_metadata
        _make_optimizer_state(optimizer)
        _drop_unsaved_state(checkpoint, model, optimizer, saved)
        state = _collect(model, optimizer)
        same_world = checkpoint.world_size == self._ranks.world_size
        rng = self._empty_rng(saved) if same_world else {}
        state.update(rng)
        reader = dcp.FileSystemReader(checkpoint.path)
        try:
            dcp.load(state, storage_reader=reader, process_group=self._ranks.group)
        except CheckpointException as error:
            raise CheckpointError(
                f"{checkpoint.path}: cannot be loaded: {_root_cause(error)}"
            ) from error
        # DCP wrote into the local shards; the engine learns of it through the model's own load.
        names = [key for key in state if key.startswith("model.")]
        model.load_state_dict({name.removeprefix("model."): state[name] for name in names})
        if rng:
            restore_rng({key.rsplit(".", 1)[1]: state[key] for key in rng})
        return Loaded(read_facts(checkpoint), bool(rng))

    def _empty_rng(self, saved: dict[str, Any]) -> dict[str, Tensor]:
        prefix = f"rng.{self._ranks.rank}."
        return {
            key: torch.empty(entry.size, dtype=torch.uint8)
            for key, entry in saved.items()
            if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def _damaged_files(self, checkpoint: Checkpoint) -> list[str]:
        """Checks the contents, each rank a part of the files."""
        parts = self._ranks.on_all(
            lambda: store.damaged_files(
                checkpoint, part=self._ranks.rank, num_parts=self._ranks.world_size
            )
        )
        return sorted(name for part in parts for name in part)


def differences(checkpoint: Checkpoint, model: nn.Module) -> list[str]:
    """How a model's names and shapes differ from a checkpoint's; empty if it can be loaded."""
    saved = {
        key.removeprefix("model."): tuple(entry.size)
        for key, entry in _metadata(checkpoint).state_dict_metadata.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    own = {k: tuple(v.shape) for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    found = []
    if missing := sorted(own.keys() - saved.keys()):
        found.append(f"missing from the checkpoint: {_some(missing)}")
    if unexpected := sorted(saved.keys() - own.keys()):
        found.append(f"unknown to the model: {_some(unexpected)}")
    common = sorted(own.keys() & saved.keys())
    reshaped = [f"{k} {saved[k]} -> {own[k]}" for k in common if saved[k] != own[k]]
    if reshaped:
        found.append(f"of another shape: {_some(reshaped)}")
    return found


def read_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the caller of `save` passed as `facts`."""
    return json.loads((checkpoint.path / _FACTS).read_text())


def _collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = {f"model.{k}": v for k, v in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            state[f"optim.{name}.{slot}"] = value
    return state


def _make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Has the optimizer allocate its slots, which it does in its first step: one that changes
    nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _drop_unsaved_state(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
) -> None:
    """A parameter that had no gradient yet has no saved state; slots missing otherwise are an
    error."""
    for name, parameter in model.named_parameters():
        slots = [f"optim.{name}.{slot}" for slot in optimizer.state.get(parameter, {})]
        missing = [key for key in slots if key not in saved]
        if missing and any(key.startswith(f"optim.{name}.") for key in saved):
            raise CheckpointError(
                f"{checkpoint.path}: was saved with another optimizer; it lacks {_some(missing)}"
            )
        if missing:
            del optimizer.state[parameter]


def _read(path: Path) -> Checkpoint:
    try:
        return store.read_checkpoint(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _metadata(checkpoint: Checkpoint) -> Metadata:
    return dcp.FileSystemReader(checkpoint.path).read_metadata()


def _some(names: list[str], limit: int = 6) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _root_cause(error: BaseException) -> str:
    """DCP wraps the error of each rank; the first one says what happened."""
    failures = getattr(error, "failures", None)
    if failures:
        inner = next(iter(failures.values()))
        return str(inner[0] if isinstance(inner, tuple) else inner)
    return str(error)
