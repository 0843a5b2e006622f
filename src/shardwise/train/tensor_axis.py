"""The tensor axis of a job: torch's tensor parallelism inside of groups of neighbouring ranks.

    rank = data rank * mesh.tensor + tensor rank

Ranks of one group read the same samples and split matrices; the engine shards what each has over
the data ranks. Where to split comes from the built-in decoder's plan here, or from the `tp_plan`
that a model of transformers has itself. Source: Megatron-LM (Shoeybi et al. 2019, arXiv
1909.08053); norms by positions (Korthikanti et al. 2022, arXiv 2205.05198).
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import ConfigError
from shardwise.train.config import Config
from shardwise.train.decoder import Decoder
from shardwise.units import text_of_bytes

# The words of transformers that torch has a style for. Heads stand in dim 2 where norms see them.
_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(
        sequence_dim=2, use_local_output=True
    ),
}
_HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class DataRanks:
    """This rank among those that read other samples: `rank` of `size`."""

    rank: int
    size: int
    tensor: int

    @classmethod
    def of(cls, config: Config, ranks: Ranks) -> DataRanks:
        tensor = config.mesh.tensor
        return cls(ranks.rank // tensor, ranks.world_size // tensor, tensor)

    def rows(self, table: Tensor) -> Tensor:
        """Of what all ranks have sent (`Ranks.gather_floats`), one row for each data rank."""
        return table[:: self.tensor]


def check_split(model: nn.Module, config: Config) -> None:
    """ConfigError where the model has no plan, or one that fits it badly."""
    if config.mesh.tensor > 1:
        _plan_of(model, config.mesh.tensor)


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Splits a model, on whatever device, over the ranks of a mesh of one dim; see
    `check_split`."""
    is_tied = isinstance(model, Decoder) and model.output.weight is model.embedding.weight
    parallelize_module(model, mesh, _plan_of(model, mesh.size()))
    _make_local(model, mesh.size(), is_tied=is_tied)


def part_of_rank(model: nn.Module, config: Config) -> nn.Module:
    """For plans: the model with the matrices that the first tensor rank has, on meta; the model
    itself without a tensor axis."""
    size = config.mesh.tensor
    if size == 1:
        return model
    part = copy.deepcopy(model).to("meta")
    is_tied = isinstance(part, Decoder) and part.output.weight is part.embedding.weight
    for name, style in _plan_of(part, size).items():
        module = part.get_submodule(name)
        if isinstance(style, ColwiseParallel | RowwiseParallel):
            by_rows = isinstance(style, ColwiseParallel) or isinstance(module, nn.Embedding)
            _narrow(module, "weight", 0 if by_rows else 1, size)
            if by_rows and getattr(module, "bias", None) is not None:
                _narrow(module, "bias", 0, size)
    _make_local(part, size, is_tied=is_tied)
    return part


def tensor_lines(model: nn.Module, config: Config) -> list[str]:
    """What the axis does, in words, with what a rank receives over it in a micro-batch: for each
    matrix that is split by rows, its output summed in the forward and its input's gradient in the
    backward, each at twice the share of the others."""
    size = config.mesh.tensor
    if size == 1:
        return []
    tokens = config.train.micro_batch * config.data.seq_len
    itemsize = 4 if config.shard.param_dtype == "float32" else 2
    plan = _plan_of(model, size)
    rows = [model.get_submodule(n) for n, s in plan.items() if isinstance(s, RowwiseParallel)]
    widths = sum(m.out_features for m in rows if isinstance(m, nn.Linear))
    total = 2 * 2 * tokens * widths * itemsize * (size - 1) // size
    num = sum(isinstance(style, ColwiseParallel | RowwiseParallel) for style in plan.values())
    line = (
        f"tensor axis: {size} neighbouring ranks split {num:,} matrices and read the same samples; "
        f"a rank receives {text_of_bytes(total)} of activations a micro-batch, in the way of the "
        "computation; keep them inside a host"
    )
    return [line]


def loss_split(model: nn.Module, config: Config) -> contextlib.AbstractContextManager[Any]:
    """Around forward and backward of a model whose logits are split."""
    if config.mesh.tensor > 1 and isinstance(model, Decoder):
        return loss_parallel()
    return contextlib.nullcontext()


def _make_local(model: nn.Module, size: int, *, is_tied: bool) -> None:
    """What of the built-in decoder counts what a rank has."""
    if not isinstance(model, Decoder):
        return  # models of transformers look at the sizes of what they get
    for block in model.blocks:
        attention: Any = block.attention
        attention.num_heads //= size
        attention.num_kv_heads //= size
    if is_tied:
        model.output.weight = model.embedding.weight


def _narrow(module: nn.Module, name: str, dim: int, size: int) -> None:
    param = module.get_parameter(name)
    shape = list(param.shape)
    shape[dim] = -(-shape[dim] // size)
    local = torch.empty(shape, dtype=param.dtype, device="meta")
    setattr(module, name, nn.Parameter(local, requires_grad=param.requires_grad))


def _plan_of(model: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """Module names and styles."""
    return _of_decoder(model) if isinstance(model, Decoder) else _of_transformers(model, size)


def _of_decoder(model: Decoder) -> dict[str, ParallelStyle]:
    """Matrices by columns, then rows; the residual stream and norms by positions; vocabulary and
    loss by words."""
    by_position, whole = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=by_position),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=by_position, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for number in range(len(model.blocks)):
        block = f"blocks.{number}"
        plan[f"{block}.attention_norm"] = SequenceParallel()
        plan[f"{block}.attention"] = PrepareModuleInput(
            input_layouts=(by_position, None), desired_input_layouts=(whole, None)
        )
        for name in ("query", "key", "value"):
            plan[f"{block}.attention.{name}"] = ColwiseParallel()
        plan[f"{block}.attention.out"] = RowwiseParallel(output_layouts=by_position)
        plan[f"{block}.feed_forward_norm"] = SequenceParallel()
        plan[f"{block}.feed_forward"] = PrepareModuleInput(
            input_layouts=by_position, desired_input_layouts=whole
        )
        for name in ("gate", "up"):  # a hidden dim may be uneven: DTensor knows whose part is whose
            plan[f"{block}.feed_forward.{name}"] = ColwiseParallel(use_local_output=False)
        plan[f"{block}.feed_forward.down"] = RowwiseParallel(output_layouts=by_position)
    return plan


def _of_transformers(model: nn.Module, size: int) -> dict[str, ParallelStyle]:
    config: Any = model.config
    sizes = config.get_text_config()
    words = _words_of(model)
    name_of = type(model).__name__
    if not words:
        raise ConfigError(f"mesh.tensor: {name_of} of transformers has no tensor parallel plan")
    for key in _HEADS:
        count = getattr(sizes, key, None)
        if isinstance(count, int) and count % size:
            raise ConfigError(
                f"mesh.tensor: {count} {key} of {name_of} cannot be shared by {size} ranks evenly"
            )
    modules = dict(model.named_modules())
    plan: dict[str, ParallelStyle] = {}
    by_pattern: dict[str, str] = {}
    for pattern, word in words.items():
        found = [name for name in modules if _fits(pattern, name)]
        if not found:
            raise ConfigError(
                f"mesh.tensor: {pattern!r} of {name_of}'s tensor parallel plan names no module"
            )
        if word not in _STYLES:
            raise ConfigError(
                f"mesh.tensor: {name_of} splits {found[0]} as {word!r}, which torch has no style "
                f"for; there are {', '.join(_STYLES)}"
            )
        for name in found:
            if name in plan:
                raise ConfigError(
                    f"mesh.tensor: {name} is named twice in {name_of}'s tensor parallel plan, by "
                    f"{by_pattern[name]!r} and {pattern!r}"
                )
            _check_sizes(name, modules[name], word, size)
            plan[name], by_pattern[name] = _STYLES[word](), pattern
    return plan


def _words_of(model: Any) -> Mapping[str, str]:
    """Of the layers; the head stays whole, for losses that take a chunk of it at a time."""
    inner = getattr(model, "base_model_prefix", "")
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    return {f"{inner}.{pattern}" if inner else pattern: word for pattern, word in plan.items()}


def _fits(pattern: str, name: str) -> bool:
    """A star is one part of a name."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _check_sizes(name: str, module: nn.Module, word: str, size: int) -> None:
    if not isinstance(module, nn.Linear):
        if word != "replicated_with_grad_allreduce":
            kind = type(module).__name__
            raise ConfigError(f"mesh.tensor: {name} is a {kind}; only Linear can be split")
        return
    is_rows = word.startswith("rowwise")
    count = module.in_features if is_rows else module.out_features
    if count % size:
        what = "in_features" if is_rows else "out_features"
        raise ConfigError(
            f"mesh.tensor: {count} {what} of {name} cannot be shared by {size} ranks evenly"
        )
