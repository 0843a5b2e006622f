"""Adapters of low rank (LoRA) in a model, by `peft`: they are trained, everything else is frozen.

`peft` puts them into the model in place, so it stays the class that it is, and its own forward
runs. Frozen weights keep their dtype and get no gradients, so what is reduced are the adapters'
bytes alone; adapters are kept in float32. A checkpoint holds them and nothing else: the base is
where it was. Paper: https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.train.config import LoraConfig
from shardwise.train.hf.library import library, quietly

ALL, ADAPTER, CONFIG_FILE = "all-linear", "default", "adapter_config.json"


def add_adapters(model: Any, section: LoraConfig) -> dict[str, str]:
    """Puts adapters into a model on meta and freezes the rest; {name before: name now} of tensors
    that have another one now."""
    peft = library("peft", "lora.rank")
    names = _names_of(model)
    targets = find_targets(model, section.targets)
    config = peft.LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.config._name_or_path,
    )
    with quietly(), torch.device("meta"):
        peft.inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                kept = torch.empty_like(parameter, dtype=torch.float32)
                module._parameters[key] = nn.Parameter(kept)
    model.saved_names = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    model.saved_beside = {CONFIG_FILE: as_json(config, targets)}
    return {names[key]: name for key, name in _names_of(model).items() if key in names}


def find_targets(model: Any, patterns: str | tuple[str, ...]) -> list[str]:
    """Names of the matrices that get adapters; ConfigError for a pattern that finds none. A word
    without a dot or star is the last part of a name."""
    kinds = (nn.Linear, library("transformers.pytorch_utils").Conv1D)
    head = model.get_output_embeddings()
    matrices = [n for n, m in model.named_modules() if isinstance(m, kinds)]
    if patterns == ALL:
        return [n for n in matrices if model.get_submodule(n) is not head]
    wanted = (patterns,) if isinstance(patterns, str) else patterns
    found: dict[str, None] = {}
    for pattern in wanted:
        hits = [n for n in matrices if _fits(n, pattern)]
        if not hits:
            last = sorted({n.rpartition(".")[2] for n in matrices})
            close = difflib.get_close_matches(pattern, last, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(last)}"
            raise ConfigError(
                f"lora.targets: no matrix of {type(model).__name__} is called {pattern!r}; {hint}"
            )
        found |= dict.fromkeys(hits)
    return list(found)


def _fits(name: str, pattern: str) -> bool:
    if pattern.isidentifier():
        return name.rpartition(".")[2] == pattern
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def _names_of(model: nn.Module) -> dict[tuple[int, int], str]:
    """Names by tensor and occurrence: a tied one has several."""
    found: dict[tuple[int, int], str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        times = sum(key[0] == id(tensor) for key in found)
        found[id(tensor), times] = name
    return found


def as_json(config: Any, targets: list[str]) -> str:
    """peft's configuration as its file has it."""
    said = config.to_dict()
    said = {k: v.value if hasattr(v, "value") else v for k, v in said.items()}
    said["target_modules"] = _shortened(targets)
    said["inference_mode"] = True
    return json.dumps(said, indent=2, sort_keys=True, default=sorted)


def _shortened(targets: list[str]) -> list[str]:
    return sorted(targets)


@contextlib.contextmanager
def with_base(model: Any) -> Iterator[None]:
    """Within it the frozen base counts as part of what is loaded."""
    saved = model.__dict__.pop("saved_names", None)
    try:
        yield
    finally:
        if saved is not None:
            model.saved_names = saved


@torch.no_grad()
def fill_adapters(model: nn.Module, seed: int) -> None:
    """As `peft` does it (A by Kaiming's rule, B zero), the same on any number of ranks."""
    layers = library("peft.tuners.lora").LoraLayer
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in model.modules():
            if isinstance(module, layers):
                module.reset_lora_parameters(ADAPTER, True)
