"""What makes weights a Hugging Face directory: configuration and tokenizer, beside them.

A checkpoint of ours keeps the configuration's text, and the directory that the weights once came
from, whose tokenizer goes along where no other directory is named for that; a source that is a
directory has its own files. A model of `transformers` may stand inside a wrapper (which computes a
loss, say): what is written is that model, and its names lose the wrapper's prefix.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.checkpoint.bounded import parse_json
from shardwise.checkpoint.names import canonical, wrapped
from shardwise.checkpoint.said import Said
from shardwise.checkpoint.source import Source
from shardwise.engine.module import FSDPModule

# The key of our objects: {"prefix": ..., "from": ..., "tokenizer_from": ..., file name: text}
BESIDE = "beside"
_OF_MODEL = ("config.json", "generation_config.json")
_NAMES = re.compile(
    r"(config|generation_config|preprocessor_config|processor_config|special_tokens_map"
    r"|added_tokens|tokenizer\w*|vocab|spiece|sentencepiece[\w.]*|merges|chat_template)"
    r"\.(json|txt|model|jinja)"
)
_MAX_BYTES = 64 * 2**20


def described_model(model: nn.Module) -> tuple[str, Any] | None:
    """The outermost module with a configuration of `transformers`, and the prefix of its names."""
    for name, module in model.named_modules():
        is_described = callable(getattr(getattr(module, "config", None), "to_json_string", None))
        if is_described and wrapped(module) is None:
            name = canonical(model, name)
            return (f"{name}." if name else ""), module
    return None


def unsharded_class(model: nn.Module) -> type[Any]:
    """The class that a module had before `fully_shard`."""
    ours = FSDPModule.__mro__
    return next(k for k in type(model).__mro__ if not issubclass(k, FSDPModule) and k not in ours)


def files_of_model(model: nn.Module) -> dict[str, str]:
    """What a checkpoint keeps under `BESIDE`; nothing for a model without a configuration."""
    if (found := described_model(model)) is None:
        return {}
    prefix, module = found
    # Where a job has changed the configuration in use, the model carries the one to keep.
    config = json.loads(getattr(module, "saved_config", "") or module.config.to_json_string())
    config["architectures"] = [unsharded_class(module).__name__]
    files = {"prefix": prefix, "config.json": json.dumps(config, indent=2, sort_keys=True)}
    files |= getattr(module, "saved_beside", {})
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        files["generation_config.json"] = generation.to_json_string()
    if origin := getattr(module.config, "_name_or_path", ""):
        files["from"] = str(Path(origin).absolute())
    return files


def contents(files: Mapping[str, str], dtypes: Iterable[Any] = ()) -> dict[str, bytes]:
    """The files to write, of what a checkpoint keeps; `dtypes` are those of the weights as
    written."""
    found = files_in(Path(files["from"])) if "from" in files else {}
    if "tokenizer_from" in files:
        found = {n: found[n] for n in _OF_MODEL if n in found}
        found |= tokenizer_in(Path(files["tokenizer_from"]))
    found |= {n: t.encode() for n, t in files.items() if _NAMES.fullmatch(n)}
    floating = [d for d in dtypes if d.is_floating_point]
    if "config.json" in found and floating:
        config = Said(parse_json(found["config.json"], "config.json"), "config.json").of(dict)
        config["dtype"] = str(floating[0]).removeprefix("torch.")
        config.pop("torch_dtype", None)
        found["config.json"] = json.dumps(config, indent=2, sort_keys=True).encode()
    return found


def files_in(directory: Path) -> dict[str, bytes]:
    """The configuration, tokenizer and so on in a directory of weights; none without a
    config.json."""
    # False for a name that cannot be
    return _files_in(directory) if os.path.isfile(directory / "config.json") else {}


def tokenizer_in(directory: Path) -> dict[str, bytes]:
    """What is there of a tokenizer or processor, with or without a model."""
    found = _files_in(directory) if os.path.isdir(directory) else {}
    return {name: content for name, content in found.items() if name not in _OF_MODEL}


def tokenizer_of(source: Source) -> dict[str, bytes]:
    """What goes with weights, the model's own configuration left out."""
    if BESIDE in source.objects:
        found = contents(source.objects[BESIDE])
        return {name: content for name, content in found.items() if name not in _OF_MODEL}
    return tokenizer_in(source.path if source.path.is_dir() else source.path.parent)


def _files_in(directory: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if _NAMES.fullmatch(path.name) and path.is_file() and path.stat().st_size <= _MAX_BYTES
    }


def tokenizers_of(model: nn.Module) -> list[Any]:
    """Tokenizers and processors that stand at the model or its wrapper."""
    around = [model, found[1]] if (found := described_model(model)) is not None else [model]
    held = [getattr(m, key, None) for m in around for key in ("tokenizer", "processor")]
    return [t for t in held if callable(getattr(t, "save_pretrained", None))]
