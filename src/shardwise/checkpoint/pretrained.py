"""Weights in and out of a sharded model: whatever `importing` opens, straight into the shards.

model = build_on_meta(); shardwise.shard_model(model)
shardwise.load_pretrained(model, "path/of/a/hugging_face_directory")
...
shardwise.save_pretrained(model, "new_directory")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint import store
from shardwise.checkpoint.files import CheckedWriter
from shardwise.checkpoint.import_torch import TensorSource
from shardwise.checkpoint.importing import open_source
from shardwise.checkpoint.loading import Differences, differences, load_model
from shardwise.checkpoint.placement import storage_bytes
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.safetensors_dir import (
    MAX_SHARD_BYTES,
    begin_directory,
    finish_directory,
    split,
)
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.state import MODEL, State
from shardwise.engine.materialize import materialize, module_initialiser
from shardwise.engine.state import units_in
from shardwise.errors import CheckpointError


def load_pretrained(
    model: nn.Module,
    path: Path | str,
    *,
    strict: bool = True,
    cast: bool = True,
    device: torch.device | str | None = None,
) -> Differences:
    """Fills a model from a directory or file of weights. A collective; every rank reads what it
    holds.

    Args:
        model: sharded or plain; on the meta device it is given memory first, and modules that hold
            what the source lacks (buffers that are not saved, say) initialise themselves.
        path: anything that `shardwise checkpoint ls` can show.
        strict: refuse names that only one side has; otherwise they are returned.
        cast: convert dtypes; otherwise another dtype is refused.
        device: where a plain model on the meta device goes, and buffers of a sharded one.

    Raises:
        CheckpointError: all missing, unexpected and reshaped names in one report, before the
            model is changed.
    """
    ranks = Ranks.of_job()
    return ranks.on_each(lambda: _load(model, path, strict, cast, device))


def _load(
    model: nn.Module,
    path: Path | str,
    strict: bool,
    cast: bool,
    device: torch.device | str | None,
) -> Differences:
    source = open_source(path)
    try:
        return fill_model(source, model, strict=strict, cast=cast, device=device)
    finally:
        source.close()


def load_full_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Tensor],
    *,
    strict: bool = True,
    cast: bool = True,
    device: torch.device | str | None = None,
) -> Differences:
    """Fills a model from whole tensors, such as `torch.load(file, mmap=True, weights_only=True)`:
    each rank copies its rows and touches no others. Arguments as for `load_pretrained`."""
    tensors = {MODEL + name: t for name, t in state_dict.items() if isinstance(t, Tensor)}
    objects = {MODEL + n: v for n, v in state_dict.items() if not isinstance(v, Tensor)}
    source = TensorSource(Path("state_dict"), tensors, objects)
    return fill_model(source, model, strict=strict, cast=cast, device=device)


def fill_model(
    source: Source,
    model: nn.Module,
    *,
    strict: bool,
    cast: bool,
    device: torch.device | str | None,
) -> Differences:
    """`load_model`, with memory for what is on the meta device."""
    found = differences(source, model, cast=cast)
    if found.reshaped or found.recast or (strict and found):
        raise CheckpointError(f"{source.path}: does not fit the model: {found}")
    _give_memory(model, set(found.missing), device)
    return load_model(source, model, strict=strict, cast=cast)


def _give_memory(model: nn.Module, missing: set[str], device: torch.device | str | None) -> None:
    on_meta = {n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta}
    if not on_meta:
        return
    saved = model.state_dict(keep_vars=True).keys()
    waiting = {n.rpartition(".")[0] for n in on_meta if n not in saved or n in missing}
    names = {id(m): n for n, m in model.named_modules()}

    def initialise(module: nn.Module) -> None:
        if names[id(module)] in waiting:
            call = module_initialiser(module)
            if call is None:
                raise CheckpointError(
                    f"{names[id(module)] or type(model).__name__}: holds tensors that the source "
                    "lacks, and has no reset_parameters to fill them"
                )
            call()

    if units_in(model):
        materialize(model, device=device, init=initialise)
        return
    model.to_empty(device=device or "cpu")
    for module in model.modules():
        initialise(module)


# -- out -----------------------------------------------------------------------------------------
@torch.no_grad()
def save_pretrained(
    model: nn.Module,
    directory: Path | str,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes the weights as a Hugging Face directory: safetensors files of at most
    `max_shard_bytes`, tied tensors once. A collective; one tensor at a time is whole.

    Args:
        directory: must be empty or not there; appears when it is complete.
        dtype: what floating-point weights become; None leaves them.
    """
    ranks, directory = Ranks.of_job(), Path(directory)
    state = State()
    state.add_model(model)
    tensors = {key.removeprefix(MODEL): t for key, t in state.tensors.items()}
    if state.objects:
        raise CheckpointError(
            f"{next(iter(state.objects))}: extra state has no place in safetensors"
        )
    kinds = {n: dtype if dtype and t.is_floating_point() else t.dtype for n, t in tensors.items()}
    sized = [(n, kinds[n], tuple(tensors[n].shape)) for n in sorted(tensors)]
    files = split(sized, max_shard_bytes)
    saving = ranks.on_rank0(lambda: begin_directory(directory))
    failed: list[Exception] = []
    for name, layout in files.items():
        order = [s.name for s in layout.tensors]
        wholes = _wholes(tensors, kinds, order)
        if ranks.rank != 0:
            for _ in wholes:  # takes part in gathering
                pass
            continue
        _write_all(saving / name, layout.header, layout.size_bytes, wholes, failed)

    def finish() -> None:
        if failed:
            store.discard(saving)
            raise CheckpointError(f"{directory}: cannot be written: {failed[0]}")
        finish_directory(saving, directory, files)

    ranks.on_rank0(finish)


def _wholes(
    tensors: dict[str, Tensor], kinds: dict[str, torch.dtype], order: list[str]
) -> Iterator[Tensor]:
    for name in order:
        tensor = tensors[name].detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield whole.to(kinds[name])


def _write_all(
    path: Path, header: bytes, size_bytes: int, wholes: Iterator[Tensor], failed: list[Exception]
) -> None:
    """One file. After an error the gathering goes on: the other ranks are in it."""
    writer: CheckedWriter | None = None
    try:
        writer = CheckedWriter(path, size_bytes)
        writer.write(header)
    except OSError as error:
        failed.append(error)
    for whole in wholes:
        if writer is None or failed:
            continue
        try:
            if whole.numel():
                writer.write(storage_bytes(whole.cpu().contiguous()))
        except OSError as error:
            failed.append(error)
    if writer is not None:
        try:
            if not failed:
                writer.finish()
        except OSError as error:
            failed.append(error)
        writer.abandon()
