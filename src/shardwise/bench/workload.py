"""What is trained: a model, and the micro-batches of each rank. The same for every engine.

Each rank cycles through a few fixed micro-batches of its own, so the loss falls as they are learnt,
and an engine that averages gradients wrongly ends at another loss (the floor, which does not
average at all, shows how far away that is).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shardwise.errors import ConfigError
from shardwise.train.config import DecoderConfig

if TYPE_CHECKING:
    from torch import nn

Precision = Literal["fp32", "bf16"]
SEED = 20_240_601
NUM_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: how the model is called, and what becomes of its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Any] | None = None
    is_plain: bool = False  # the only argument is a batch as a training job reads it

    def for_model(self, model: nn.Module) -> Batch:
        """A plain one as `model`, which no engine has wrapped yet, takes it."""
        if not self.is_plain:
            return self
        from shardwise.train.calling import arguments_of

        return Batch(*arguments_of(model, self.args[0]))

    def loss_of(self, model: nn.Module) -> Any:
        """The loss, a scalar: of `loss`, or what the model itself calls so."""
        output = model(*self.args, **self.kwargs)
        if self.loss is not None:
            return self.loss(output)
        if isinstance(output, dict):
            return output.get("loss")
        return getattr(output, "loss", output)

    def cast(self, dtype: Any) -> Batch:
        """The same with floating-point tensors of `dtype`."""
        return Batch(_cast(self.args, dtype), _cast(self.kwargs, dtype), self.loss)


class Workload(Protocol):
    """What rank processes get: plain data that can be pickled."""

    @property
    def name(self) -> str: ...
    @property
    def items(self) -> str:
        """What speed counts: tokens, samples."""
        ...

    @property
    def unit(self) -> str | int | tuple[str, ...]:
        """What becomes a unit, as `shard_model` takes it; the same for all engines."""
        ...

    def build(self) -> nn.Module:
        """The whole model on the CPU, with the same weights whenever it is called."""
        ...

    def batches(self, rank: int, num_ranks: int) -> list[Batch]: ...
    def num_items(self, batch: Batch) -> int: ...


@dataclass(frozen=True, slots=True)
class DecoderWorkload:
    """The built-in decoder; a micro-batch is one sequence of `num_tokens`."""

    name: str
    layers: int
    dim: int
    heads: int
    num_tokens: int
    vocab_size: int = 4096
    items: str = "tokens"
    unit: str | int | tuple[str, ...] = "auto"

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig(
            dim=self.dim, layers=self.layers, heads=self.heads, vocab_size=self.vocab_size
        )

    @property
    def num_params(self) -> int:
        import torch

        from shardwise.train.decoder import Decoder

        with torch.device("meta"):
            model = Decoder(self.config, self.num_tokens)
        return sum(p.numel() for p in model.parameters())

    def build(self) -> nn.Module:
        import torch

        from shardwise.train.decoder import Decoder

        torch.manual_seed(SEED)
        return Decoder(self.config, self.num_tokens)

    def batches(self, rank: int, num_ranks: int) -> list[Batch]:
        """This rank's micro-batches, int64 [1, T + 1]."""
        import torch

        source = torch.Generator().manual_seed(SEED + 1 + rank)
        shape = (1, self.num_tokens + 1)
        tokens = [
            torch.randint(self.vocab_size, shape, generator=source) for _ in range(NUM_BATCHES)
        ]
        return [Batch((t,)) for t in tokens]

    def num_items(self, batch: Batch) -> int:
        return self.num_tokens


WORKLOADS = {
    w.name: w
    for w in (
        DecoderWorkload("tiny", layers=2, dim=64, heads=2, num_tokens=32, vocab_size=256),
        DecoderWorkload("23M", layers=6, dim=512, heads=8, num_tokens=128),
        DecoderWorkload("50M", layers=6, dim=768, heads=12, num_tokens=256),
        DecoderWorkload("185M", layers=14, dim=1024, heads=16, num_tokens=512),
    )
}


def workload_named(name: str) -> DecoderWorkload:
    if name not in WORKLOADS:
        raise ConfigError(f"--workload: no workload {name!r}; there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def _cast(value: Any, dtype: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_cast(item, dtype) for item in value)
    return value
