"""From a source to what other programs read, in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.beside import BESIDE, contents, files_in
from shardwise.checkpoint.files import sync_directory
from shardwise.checkpoint.names import without_private
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
    strip_prefix: str | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> int:
    """Writes the weights as a Hugging Face directory, with the configuration and the tokenizer that
    the source knows of. Returns their number.

    Args:
        dtype: what floating-point weights become; None leaves them.
        strip_prefix: what names lose, where they have it; by default the prefix of a wrapper
            around a model of `transformers`.
        beside: more files to write.
    """
    stored = _stripped(source, strip_prefix)
    infos = {name: source.tensors[key] for name, key in stored.items()}
    kinds = {name: _target(info.dtype, dtype) for name, info in infos.items()}
    write_directory(
        directory,
        [(name, kinds[name], infos[name].shape) for name in sorted(stored)],
        lambda name: pieces(source, stored[name], kinds[name]),
        max_shard_bytes,
        {**files_of_source(source, kinds.values()), **(beside or {})},
    )
    return len(stored)


def files_of_source(source: Source, dtypes: Iterable[Any]) -> dict[str, bytes]:
    """The same for what is exported."""
    if BESIDE in source.objects:
        return contents(source.objects[BESIDE], dtypes)
    here = source.path if source.path.is_dir() else source.path.parent
    texts = files_in(here)
    if "config.json" not in texts:
        return {}
    config = texts.pop("config.json").decode(errors="replace")
    return texts | contents({"config.json": config}, dtypes)


def prefix_of(source: Source) -> str:
    """What the names of all weights begin with because a wrapper stood around the model."""
    prefix = source.objects.get(BESIDE, {}).get("prefix", "")
    names = [k for k in source.tensors if k.startswith(MODEL)]
    return prefix if all(k.startswith(MODEL + prefix) for k in names) else ""


def _stripped(source: Source, prefix: str | None) -> dict[str, str]:
    """{name to write: key of the source}."""
    prefix = prefix_of(source) if prefix is None else prefix
    names = weights_of(source)
    if prefix and not any(name.startswith(prefix) for name in names):
        raise CheckpointError(
            f"{source.path}: no name begins with {prefix!r}; the first is {names[0]}"
        )
    stored: dict[str, str] = {}
    for name in names:
        short = without_private(name).removeprefix(prefix)
        if not short or short in stored:
            raise CheckpointError(f"{source.path}: without {prefix!r} {name} has no own name")
        stored[short] = MODEL + name
    return stored


def export_torch(
    source: Source,
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    strip_prefix: str | None = None,
) -> int:
    """Writes the weights as one `torch.save` file of a plain state dict; needs memory for all."""
    if path.exists():
        raise CheckpointError(f"{path}: exists; choose another name")
    stored, state = _stripped(source, strip_prefix or ""), {}
    for name, key in stored.items():
        tensor = read_whole(source, key)
        state[name] = tensor.to(_target(tensor.dtype, dtype))
    own = {key: name for name, key in stored.items()}
    for alias, key in source.ties.items():
        if alias.startswith(MODEL):
            state[alias.removeprefix(MODEL).removeprefix(strip_prefix or "")] = state[own[key]]
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
