"""From a checkpoint of the job to a directory that `transformers`, or `peft`, loads.

    all weights trained      config.json, generation_config.json, model*.safetensors, tokenizer,
                             README.md: the model card
    adapters trained         adapter_config.json, adapter_model.safetensors, tokenizer, README.md

Read from the files of the checkpoint in pieces, by one process: nobody holds the whole model. What
is written is complete, or not there. `merge` adds adapters to the base that they stand beside.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from shardwise.checkpoint.beside import BESIDE, contents, files_in, tokenizer_in, tokenizer_of
from shardwise.checkpoint.exporting import export_safetensors
from shardwise.checkpoint.importing import open_source
from shardwise.checkpoint.placement import storage_bytes
from shardwise.checkpoint.safetensors_dir import MAX_SHARD_BYTES, pieces, write_directory
from shardwise.checkpoint.source import CheckpointSource, Source, read_whole
from shardwise.checkpoint.state import MODEL
from shardwise.errors import CheckpointError
from shardwise.train.config import Config
from shardwise.train.hf.card import CARD_FILE, card_of
from shardwise.train.run_dir import RunDir, lacks_model
from shardwise.train.text.tokenizer import has_tokenizer

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PEFT, _ADAPTER = "base_model.model.", ".default."
_NOT_MERGED = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")


def _warn(text: str) -> None:
    """One line, whatever a checkpoint's names hold."""
    print("".join(c if c.isprintable() else repr(c)[1:-1] for c in text), file=sys.stderr)


def export(
    source: Source,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    strip_prefix: str | None = None,
    tokenizer: Path | None = None,
    tell: Callable[[str], None] = _warn,
) -> int:
    """Writes what the source holds; returns the number of tensors. `tokenizer`: the directory of
    that, if not where it was. `tell` hears what was to go along and is not there."""
    beside = _card(source)
    if tokenizer is not None:
        beside |= _named_tokenizer(source, tokenizer)
    if is_adapters(source):
        count = _export_adapters(source, directory, dtype, beside)
    else:
        count = export_safetensors(
            source,
            directory,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            strip_prefix=strip_prefix,
            beside=beside,
        )
    _tell_lacking(source, directory, tell)
    return count


def _named_tokenizer(source: Source, folder: Path) -> dict[str, bytes]:
    """The files to write; for checkpoints that keep texts in place of some, only where it is."""
    if not has_tokenizer(folder):
        raise CheckpointError(f"--tokenizer: {folder} holds no tokenizer (tokenizer.json, ...)")
    if BESIDE not in source.objects:
        return tokenizer_in(folder)
    source.objects[BESIDE]["tokenizer_from"] = str(folder.absolute())
    return {}


def _tell_lacking(source: Source, directory: Path, tell: Callable[[str], None]) -> None:
    """A directory without its tokenizer loads, and only whoever calls it finds out."""
    said = source.objects.get(BESIDE, {})
    folder = Path(said.get("tokenizer_from") or said.get("from") or ".")
    was_there = "tokenizer_from" in said or not folder.exists()
    if was_there and not has_tokenizer(directory):
        why = "holds none any more" if folder.is_dir() else "is not there any more"
        tell(
            f"{directory} has no tokenizer: {folder}, where it was, {why}. Copy its files "
            "(tokenizer.json, tokenizer_config.json) there, or export again with --tokenizer DIR"
        )


def export_at_end(checkpoint: Path, directory: Path, tell: Callable[[str], None] = _warn) -> None:
    """The same for a run's last checkpoint, in place of what an earlier end has left there."""
    new, old = (directory.with_name(f".{directory.name}.{word}") for word in ("new", "old"))
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)
    source = open_source(checkpoint)
    try:
        export(source, new, tell=lambda text: tell(text.replace(str(new), str(directory))))
    finally:
        source.close()
    if directory.exists():
        directory.rename(old)
    new.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def export_left(config: Config) -> str:
    """For a run that is complete: writes the model where a kill came before that; what to tell."""
    if not lacks_model(config):
        return ""
    run = RunDir(config)
    export_at_end(run.checkpoints, run.model)
    return f"the model is in {run.model}"


def _card(source: Source) -> dict[str, bytes]:
    """For checkpoints of a job on such a model."""
    if not isinstance(source, CheckpointSource) or BESIDE not in source.objects:
        return {}
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # another's words
        return {CARD_FILE: card_of(source).encode()}
    return {}


def is_adapters(source: Source) -> bool:
    return CONFIG_FILE in source.objects.get(BESIDE, {})


def _export_adapters(
    source: Source, directory: Path, dtype: torch.dtype | None, card: dict[str, bytes]
) -> int:
    beside: dict[str, str] = source.objects[BESIDE]
    kept = tokenizer_of(source)
    names = {_peft_name(k): k for k in sorted(source.tensors) if k.startswith(MODEL)}
    kinds = {name: dtype or source.tensors[key].dtype for name, key in names.items()}
    write_directory(
        directory,
        [(name, kinds[name], source.tensors[key].shape) for name, key in names.items()],
        lambda name: pieces(source, names[name], kinds[name]),
        MAX_SHARD_BYTES,
        {**kept, CONFIG_FILE: beside[CONFIG_FILE].encode(), **card},
        only_file=WEIGHTS_FILE,  # peft knows no other
    )
    return len(names)


def _peft_name(key: str) -> str:
    return _PEFT + key.removeprefix(MODEL).replace(_ADAPTER, ".")


# -- adapters into their base --------------------------------------------------------------------
def merge(
    path: Path,
    directory: Path,
    *,
    base: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tell: Callable[[str], None] = _warn,
) -> int:
    """Writes the base with the adapters at `path` (a run, a checkpoint or a directory of peft)
    added to it, a matrix at a time; `dtype` None: the base's."""
    from shardwise.train.config import HFModelConfig
    from shardwise.train.hf.build import build_on_meta
    from shardwise.train.hf.description import describe
    from shardwise.train.hf.weights import open_directory, under_names_of_model

    adapters = _Adapters(path)
    described = describe(HFModelConfig(path=str(base or adapters.base)))
    source = open_directory(described)
    model = build_on_meta(described, torch.float32, "eager")
    weights = under_names_of_model(source, described, model)
    keys = {key.removeprefix(MODEL): key for key in sorted(weights.tensors)}
    if unknown := sorted(n for n in adapters.names if f"{n}.weight" not in keys):
        raise CheckpointError(f"{path}: {described.path} has no {unknown[0]}: is it the base?")
    kinds = {
        name: dtype if dtype and weights.tensors[key].dtype.is_floating_point else
        weights.tensors[key].dtype for name, key in keys.items()
    }  # fmt: skip

    def content(name: str) -> Iterator[memoryview]:
        if (matrix := name.removesuffix(".weight")) not in adapters.names:
            yield from pieces(weights, keys[name], kinds[name])
            return
        whole = read_whole(weights, keys[name]).float() + adapters.added_to(matrix)
        yield storage_bytes(whole.to(kinds[name]).contiguous())

    beside = files_in(described.path)
    beside |= contents({"config.json": described.text}, kinds.values())
    beside |= tokenizer_of(adapters.source)
    beside |= _card(adapters.source)
    sized = [(name, kinds[name], weights.tensors[key].shape) for name, key in keys.items()]
    write_directory(directory, sized, content, max_shard_bytes, beside)
    _tell_lacking(adapters.source, directory, tell)
    adapters.close()
    weights.close()
    return len(keys)


class _Adapters:
    """What adds to which matrix: scale * B @ A."""

    def __init__(self, path: Path) -> None:
        file = path / CONFIG_FILE
        self.source = open_source(path)
        if file.is_file():
            text, self._key = file.read_text(encoding="utf-8"), _key_of_peft
        elif is_adapters(self.source):
            text, self._key = self.source.objects[BESIDE][CONFIG_FILE], _key_of_ours
        else:
            raise CheckpointError(f"{path}: holds no adapters (no {CONFIG_FILE}): nothing to merge")
        try:
            said = json.loads(text)
            self.base, rank = Path(str(said["base_model_name_or_path"])), int(said["r"])
            self._scale, self._is_turned = said["lora_alpha"] / rank, said.get("fan_in_fan_out")
        except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            text = f"{type(error).__name__} {error}"
            raise CheckpointError(f"{file}: is no configuration of LoRA: {text}") from None
        if used := [key for key in _NOT_MERGED if said.get(key)]:
            raise CheckpointError(f"{path}: {used[0]} cannot be merged here; use peft's own merge")
        marks = (".lora_A", ".lora_B")
        parts = {k for k in self.source.tensors if k.startswith(MODEL) and marks[0] in k}
        self.names = {self._name(k, marks[0]) for k in parts}
        if not self.names:
            raise CheckpointError(f"{path}: holds no adapters")

    def _name(self, key: str, mark: str) -> str:
        return key.removeprefix(MODEL).removeprefix(_PEFT).partition(mark)[0]

    def added_to(self, name: str) -> Tensor:
        a, b = (read_whole(self.source, self._key(name, part)).float() for part in "AB")
        added = self._scale * (b @ a)
        return added.T if self._is_turned else added

    def close(self) -> None:
        self.source.close()


def _key_of_peft(name: str, part: str) -> str:
    return f"{MODEL}{_PEFT}{name}.lora_{part}.weight"


def _key_of_ours(name: str, part: str) -> str:
    return f"{MODEL}{name}.lora_{part}{_ADAPTER}weight"
