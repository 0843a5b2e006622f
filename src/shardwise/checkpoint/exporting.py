"""From a source to what other programs read, in pieces."""

from __future__ import annotations

from pathlib import Path

import torch

from shardwise.checkpoint.files import sync_directory
from shardwise.checkpoint.safetensors_dir import MAX_SHARD_BYTES, pieces, write_directory
from shardwise.checkpoint.source import Source, read_whole
from shardwise.checkpoint.state import MODEL
from shardwise.errors import CheckpointError


def weights_of(source: Source) -> list[str]:
    """Names of the weights, in order; tied ones once."""
    names = [k.removeprefix(MODEL) for k in sorted(source.tensors) if k.startswith(MODEL)]
    if not names:
        raise CheckpointError(f"{source.path}: holds no weights")
    return names


def export_safetensors(
    source: Source,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> int:
    """Writes the weights as a Hugging Face directory. Returns their number.

    Args:
        dtype: what floating-point weights become; None leaves them.
    """
    names = weights_of(source)
    sized = []
    for name in names:
        info = source.tensors[MODEL + name]
        sized.append((name, _target(info.dtype, dtype), info.shape))
    kinds = {name: kind for name, kind, _ in sized}
    write_directory(
        directory,
        sized,
        lambda name: pieces(source, MODEL + name, kinds[name]),
        max_shard_bytes,
    )
    return len(names)


def export_torch(source: Source, path: Path, *, dtype: torch.dtype | None = None) -> int:
    """Writes the weights as one `torch.save` file of a plain state dict; needs memory for all."""
    if path.exists():
        raise CheckpointError(f"{path}: exists; choose another name")
    state = {}
    for name in weights_of(source):
        tensor = read_whole(source, MODEL + name)
        state[name] = tensor.to(_target(tensor.dtype, dtype))
    for alias, name in source.ties.items():
        if alias.startswith(MODEL):
            state[alias.removeprefix(MODEL)] = state[name.removeprefix(MODEL)]
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        torch.save(state, temporary)
        temporary.replace(path)
        sync_directory(path.parent)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written: {error}") from None
    return len(state)


def _target(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own
