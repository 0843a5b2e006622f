"""`model.kind = "hf"` for the job: the model as it is to be sharded, and in words.

The model that comes out is transformers' own, on meta, its parameters under the names of its
directory. An `Origin` stands at it as `model.origin`: where it comes from, and what is to be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.source import Source
from shardwise.engine.services.materialize import give_memory
from shardwise.errors import ConfigError
from shardwise.train.config import Config, HFModelConfig
from shardwise.train.hf.attention import choose_attention
from shardwise.train.hf.build import build_on_meta
from shardwise.train.hf.description import Description, check_shares, describe
from shardwise.train.hf.lora import add_adapters, fill_adapters, with_base
from shardwise.train.hf.weights import (
    Weights,
    dtypes_of,
    fill,
    fill_anew,
    move_buffers,
    open_directory,
    under_names_of_model,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class Origin:
    """Where a model of the job comes from; `weights` stay open until it is filled."""

    described: Description
    weights: Weights | None
    dtype: torch.dtype
    attention: str
    passed_over: str  # why not an implementation of attention that comes before

    @property
    def dtypes_there(self) -> str:
        """Of the directory's weights."""
        return ", ".join(map(_name, dtypes_of(self.weights))) if self.weights else ""


def prepare(config: Config) -> Any:
    """The model of `model.path`, on meta; ConfigError for what cannot be trained."""
    section = config.model
    assert isinstance(section, HFModelConfig)
    described = describe(section)
    check_shares(described)
    attention, passed_over = choose_attention(
        described.model_class, section.attention, _device_type(config), config.shard.param_dtype
    )
    weights = open_directory(described) if described.has_weights else None
    dtype = _dtype(config, weights)
    model = build_on_meta(described, dtype, attention)
    _check_lengths(described, model, config)
    if weights is not None:
        weights = under_names_of_model(weights, described, model)
    if config.lora.rank:
        renamed = add_adapters(model, config.lora)
        assert weights is not None
        weights.rename(renamed)
    model.origin = Origin(described, weights, dtype, attention, passed_over)
    return model


def _dtype(config: Config, source: Source | None) -> torch.dtype:
    """What weights are kept in: a frozen base stays as it is where we can compute with it."""
    assert isinstance(config.model, HFModelConfig)
    if config.model.dtype != "auto":
        return _DTYPES[config.model.dtype]
    if config.lora.rank and source is not None and (found := dtypes_of(source)):
        return found[0] if found[0] in (torch.bfloat16, torch.float16) else torch.float32
    return torch.float32


def origin_of(model: nn.Module) -> Origin:
    """Of a model from `prepare`."""
    found: Any = model.origin
    assert isinstance(found, Origin)
    return found


def units_of(model: Any) -> list[str]:
    """The classes of the model's decoder layers, as it names them itself."""
    present = {type(m).__name__ for m in model.modules()}
    return sorted(present & set(model._no_split_modules or ()))


def fill_prepared(
    model: nn.Module, config: Config, device: torch.device, *, is_resumed: bool = False
) -> None:
    """Gives a model from `prepare` its weights, sharded or not; or only memory, for those of a
    checkpoint."""
    origin = origin_of(model)
    has_adapters = config.lora.rank > 0
    if is_resumed and not has_adapters:
        give_memory(model, device, ())
        move_buffers(model, device)
    elif origin.weights is None:
        fill_anew(model, device, config.run.seed)
    else:
        with with_base(model):
            fill(model, origin.weights, device)
    if has_adapters:
        fill_adapters(model, config.run.seed)
    if origin.weights is not None:
        origin.weights.close()


def in_words(model: nn.Module, config: Config) -> Iterator[str]:
    """For the console: what is trained, in which precision, with which attention."""
    origin = origin_of(model)
    described, there = origin.described, origin.dtypes_there
    found = f"weights in {there} there, " if there else "new weights, "
    yield (
        f"{described.model_class.__name__} of {described.path}: {found}kept in "
        f"{_name(origin.dtype)}, computed in {config.shard.param_dtype}"
    )
    why = f" ({origin.passed_over})" if origin.passed_over else ""
    yield f"attention: {origin.attention}{why}"
    if config.lora.rank:
        trained = [p for p in model.parameters() if p.requires_grad]
        yield (
            f"adapters of rank {config.lora.rank} beside {len(trained) // 2} matrices: "
            f"{sum(p.numel() for p in trained):,} parameters are trained, in float32; "
            "all others are frozen"
        )


def _check_lengths(described: Description, model: Any, config: Config) -> None:
    """Samples of token files have `seq_len` + 1 tokens; those of texts are looked at one by one."""
    context, length = described.context, config.data.seq_len
    if config.data.format != "tokens":
        return
    if context is not None and length > context:
        raise ConfigError(
            f"data.seq_len: {length} is more than the {context} places of the model "
            f"(max_position_embeddings in its config.json)"
        )
    embedding = model.get_input_embeddings()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not embedding]
    if any(table.num_embeddings <= length for table in tables):
        raise ConfigError(
            f"data.seq_len: a sample has one token more than {length}, and the model has learned "
            f"{context} places; use at most {length - 1}"
        )


def _device_type(config: Config) -> str:
    if config.run.device != "auto":
        return config.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
