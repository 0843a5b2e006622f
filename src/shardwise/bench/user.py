"""A user's own model and batches: two functions, or a configuration of `shardwise train`.

    --model module:function   function() -> nn.Module on the CPU (or on meta: then every module with
                              tensors needs `reset_parameters`)
    --batch module:function   function(index) -> what the model is called with: micro-batch `index`
                              of the whole job, the same whenever it is called
        (args, kwargs, loss)  loss(model(*args, **kwargs)) is the loss, a mean over the micro-batch
        (args, kwargs)        the model's output is the loss, or has it as ["loss"] or .loss
        anything else         what the training job gives the model for it (`train/calling.py`)

The functions run on every rank under the same seed. A function of the model that takes an argument
gets the options of [model], so the one that `shardwise train` uses serves here too.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.bench.workload import NUM_BATCHES, SEED, Batch
from shardwise.errors import ConfigError
from shardwise.train.config import Config, CustomModelConfig, HFModelConfig, is_factory
from shardwise.train.config_file import load_config
from shardwise.train.factory import load_factory

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class UserWorkload:
    """`--model` and `--batch`."""

    model: str
    batch: str
    unit: str | int | tuple[str, ...] = "auto"
    items: str = "samples"

    def __post_init__(self) -> None:
        for key, name in (("--model", self.model), ("--batch", self.batch)):
            if not is_factory(name):
                raise ConfigError(f"{key}: expected module:function, found {name!r}")

    @property
    def name(self) -> str:
        return self.model

    def build(self) -> nn.Module:
        return _build("--model", self.model, {}, None, SEED)

    def batches(self, rank: int, num_ranks: int) -> list[Batch]:
        import torch

        function = load_factory("--batch", self.batch, None)
        found = []
        for i in range(NUM_BATCHES):
            index = i * num_ranks + rank
            torch.manual_seed(SEED + 1 + index)
            found.append(as_batch(_call("--batch", function, index)))
        return found

    def num_items(self, batch: Batch) -> int:
        return _leading_size([batch.args, batch.kwargs])


@dataclass(frozen=True, slots=True)
class ConfigWorkload:
    """The model and data of a training configuration."""

    path: str
    unit: str | int | tuple[str, ...] = "auto"
    items: str = "tokens"

    @classmethod
    def of(cls, path: str) -> ConfigWorkload:
        config = load_config(path).config
        items = "samples" if is_factory(config.data.source) else "tokens"
        return cls(str(Path(path).resolve()), config.shard.unit, items)

    @property
    def config(self) -> Config:
        return load_config(self.path).config

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def _folder(self) -> Path:
        return Path(self.path).parent

    def build(self) -> nn.Module:
        config = self.config
        if isinstance(config.model, CustomModelConfig):
            options = dict(config.model.options)
            return _build("model.kind", config.model.kind, options, self._folder, config.run.seed)
        if isinstance(config.model, HFModelConfig):
            raise ConfigError(
                "model.kind: hf is not measured by bench; use --model with a function"
            )
        import torch

        from shardwise.train.decoder import Decoder

        torch.manual_seed(config.run.seed)
        return Decoder(config.model, config.data.seq_len)

    def batches(self, rank: int, num_ranks: int) -> list[Batch]:
        import numpy as np

        from shardwise.train.data import open_data

        config = self.config
        samples, size = open_data(config, self._folder).train, config.train.micro_batch
        starts = [(i * num_ranks + rank) * size for i in range(NUM_BATCHES)]
        indices = [np.arange(start, start + size) % len(samples) for start in starts]
        return [Batch((samples.batch(part),), is_plain=True) for part in indices]

    def num_items(self, batch: Batch) -> int:
        config = self.config
        per_sample = config.data.seq_len if self.items == "tokens" else 1
        return config.train.micro_batch * per_sample


def as_batch(value: Any) -> Batch:
    """What a `--batch` function returned, by the module docstring's rules."""
    if (
        isinstance(value, tuple)
        and len(value) in (2, 3)
        and isinstance(value[0], tuple)
        and isinstance(value[1], dict)
    ):
        loss = value[2] if len(value) == 3 else None
        if loss is not None and not callable(loss):
            kind = type(loss).__name__
            raise ConfigError(f"--batch: the third part must be a function, found {kind}")
        return Batch(value[0], value[1], loss)
    return Batch((value,), is_plain=True)


def checked_loss(loss: Any) -> Any:
    """A loss that can be trained on; a `ConfigError` otherwise."""
    import torch

    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    found = (
        f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss)
    )
    raise ConfigError(
        f"the loss must be a scalar with gradients, found {found}; return the loss from the model, "
        "or let the --batch function return (args, kwargs, loss) with loss(output) -> scalar"
    )


def _build(
    key: str, name: str, options: dict[str, Any], folder: Path | None, seed: int
) -> nn.Module:
    import torch
    from torch import nn

    function = load_factory(key, name, folder)
    takes_options = any(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        for p in inspect.signature(function).parameters.values()
    )
    torch.manual_seed(seed)
    model = _call(key, function, *([options] if takes_options else []))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{key}: {name} must return an nn.Module, got {type(model).__name__}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"{key}: {name} returns a model without trainable parameters")
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device="cpu")
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    return model


def _call(key: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a user's function; what it raises becomes one line that says where."""
    try:
        return function(*args)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{key}: {function.__qualname__} raised {type(error).__name__}: {error} "
            f"({where.filename}:{where.lineno})"
        ) from error


def _leading_size(value: Any) -> int:
    """The first dim of the first tensor found: how many samples a micro-batch holds."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else 1
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(parts, str) or not hasattr(parts, "__iter__"):
        return 0
    return next((size for part in parts if (size := _leading_size(part))), 0)
