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
from shardwise.checkpoint.beside import contents, described_model, files_of_model, tokenizers_of
from shardwise.checkpoint.files import write_pieces
from shardwise.checkpoint.import_torch import Found, TensorSource
from shardwise.checkpoint.importing import open_source
from shardwise.checkpoint.loading import Differences, differences, load_model
from shardwise.checkpoint.names import canonical, tensor_names
from shardwise.checkpoint.placement import storage_bytes
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.safetensors_dir import (
    MAX_SHARD_BYTES,
    begin_directory,
    finish_directory,
    split,
)
from shardwise.checkpoint.safetensors_file import FileLayout
from shardwise.checkpoint.source import Source
from shardwise.checkpoint.state import MODEL, State
from shardwise.checkpoint.transformers_names import under_names_of
from shardwise.engine.core.state import units_in
from shardwise.engine.services.materialize import (
    check_initialisers,
    give_memory,
    initialise,
    waiting_modules,
)
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
    described = described_model(model)
    if described is not None and not getattr(described[1].config, "_name_or_path", "x"):
        described[1].config._name_or_path = str(source.path)  # where its tokenizer is
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
    found = Found("state_dict")
    for name, value in state_dict.items():
        found.add(f"{MODEL}{name}", (name,), value, isinstance(value, Tensor))
    source = TensorSource(Path("state_dict"), found.weights(), found.values())
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
    source = under_names_of(source, model)
    found = differences(source, model, cast=cast)
    if found.reshaped or found.recast or (strict and found):
        raise CheckpointError(f"{source.path}: does not fit the model: {found}")
    _give_memory(model, set(found.missing), device)
    return load_model(source, model, strict=strict, cast=cast)


def _give_memory(model: nn.Module, missing: set[str], device: torch.device | str | None) -> None:
    """Memory for what is on meta. Modules that hold what the source lacks fill it themselves:
    buffers that no state dict has, and missing names; what is loaded afterwards stands."""
    waiting = waiting_modules(model)
    if waiting:
        saved = {*tensor_names(model).values()} - missing
        lacking = {
            name: held
            for name, held in waiting.items()
            if any(canonical(model, f"{name}.{key}".removeprefix(".")) not in saved for key in held)
        }
        check_initialisers(model, lacking)
        give_memory(model, device, lacking)
        initialise(model, lacking)
    if device is not None and not units_in(model):
        model.to(device)


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
    `max_shard_bytes`, tied tensors once. A collective; one tensor at a time is whole. The
    configuration and tokenizer of a model of `transformers` go along, and what is written is that
    model, without the wrapper that may be around it.

    Args:
        directory: must be empty or not there; appears when it is complete.
        dtype: what floating-point weights become; None leaves them.
    """
    ranks, directory = Ranks.of_job(), Path(directory)
    state = State()
    state.add_model(model)
    tensors = {key.removeprefix(MODEL): t for key, t in state.tensors.items()}
    beside = files_of_model(model)
    prefix = beside.get("prefix", "")
    if all(name.startswith(prefix) for name in tensors):
        tensors = {name.removeprefix(prefix): t for name, t in tensors.items()}
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
        _write_all(saving / name, layout, wholes, failed)

    def finish() -> None:
        if failed:
            store.discard(saving)
            raise CheckpointError(f"{directory}: cannot be written: {failed[0]}")
        for tokenizer in tokenizers_of(model):
            tokenizer.save_pretrained(saving)
        finish_directory(saving, directory, files, contents(beside, kinds.values()))

    ranks.on_rank0(finish)


def _wholes(
    tensors: dict[str, Tensor], kinds: dict[str, torch.dtype], order: list[str]
) -> Iterator[Tensor]:
    for name in order:
        tensor = tensors[name].detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield whole.to(kinds[name])


def _write_all(
    path: Path, layout: FileLayout, wholes: Iterator[Tensor], failed: list[Exception]
) -> None:
    """One file. After an error the gathering goes on: the other ranks are in it."""

    def pieces(_: str) -> Iterator[memoryview]:
        if (whole := next(wholes)).numel():
            yield storage_bytes(whole.cpu().contiguous())

    try:
        if not failed:
            write_pieces(path, layout.size_bytes, layout.content(pieces))
    except OSError as error:
        failed.append(error)
    for _ in wholes:
        pass
