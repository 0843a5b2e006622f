"""One trainer's program for two engines: torch's own FSDP2, the reference, and ours by `install()`.

    results = [program(engine, ...) for engine in ENGINES]     # torch first: see `using`

Both run in the same two processes with the same trainer, model and data, so losses and weights
differ by nothing but the engine. Two ranks: a gradient is one addition, which is commutative, and
so bit-equal; where a trainer clips, the order in which the norm is added up may differ.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.engine.core import moments

ENGINES = ("torch", "ours")
REPLICAS = "ddp"  # what Accelerate does by itself on CPU: nothing is sharded
VOCABULARY = 61
# Clipping scales gradients by a norm; the two engines add it up in another order.
TOLERANCE = 1e-5


class Seen:
    """What our engine did meanwhile: units by how often each was gathered and reduced."""

    def __init__(self) -> None:
        self.gathers: Counter[str] = Counter()
        self.reductions: Counter[str] = Counter()

    def gathering(self, unit: Any) -> None:
        self.gathers[unit.name] += 1

    def issued(self, unit: Any, reductions: list[Any]) -> None:
        self.reductions[unit.name] += bool(reductions)


@contextlib.contextmanager
def using(engine: str) -> Iterator[Seen]:
    """`install()` for ours. Trainers are imported before, else they would keep our names."""
    seen = Seen()
    with contextlib.ExitStack() as stack:
        if engine == "ours":
            stack.enter_context(sw.install())
            makers = [*moments._makers, lambda: seen]
            stack.enter_context(patch.object(moments, "_makers", makers))
        yield seen
    assert (engine == "ours") == bool(seen.gathers), seen.gathers
    assert (engine == "ours") == bool(seen.reductions), seen.reductions


@contextlib.contextmanager
def accelerate_shards(engine: str = "") -> Iterator[None]:
    """Accelerate, and all that stand on it, take their FSDP branch on CPU too, not DDP."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    kind = DistributedType.MULTI_XPU  # of those that may be sharded, the one with the fewest habits
    reset()
    with contextlib.ExitStack() as stack:
        if engine != REPLICAS:
            stack.enter_context(patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="cpu"))
            branch = patch.object(PartialState, "_prepare_backend", lambda *_: ("gloo", kind))
            stack.enter_context(branch)  # the line
        yield
    reset()


def sharded_by(model: Any, engine: str) -> list[str]:
    """The names of the sharded modules, all of which are of that engine."""
    from torch.distributed.fsdp import FSDPModule

    if engine == REPLICAS:
        return []
    kinds = {"ours": sw.FSDPModule, "torch": FSDPModule}
    names = [n for n, m in model.named_modules() if isinstance(m, kinds[engine])]
    assert names, f"{type(model).__name__} has no module that {engine} has sharded"
    if engine == "torch":
        assert not any(isinstance(m, sw.FSDPModule) for m in model.modules())
    return names


def llama(*, tied: bool = False, layers: int = 2, seed: int = 0, vocabulary: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary or VOCABULARY,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def samples(number: int, length: int = 12) -> list[dict[str, torch.Tensor]]:
    """The same on all ranks; the trainer divides them."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(3, VOCABULARY, (number, length), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, gathered: a collective."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    return {n: full(t).clone() for n, t in model.state_dict().items()}


def full(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def mean_over_ranks(value: torch.Tensor) -> float:
    value = full(value).clone().float()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def same_numbers(got: Any, want: Any, *, tolerance: float = 0.0) -> None:
    """Lists of numbers, or weights by name."""
    if isinstance(want, dict):
        assert list(got) == list(want)
        pairs = [(name, got[name], want[name]) for name in want]
    else:
        assert len(got) == len(want), (got, want)
        pairs = [(f"number {i}", *pair) for i, pair in enumerate(zip(got, want, strict=True))]
    for name, mine, theirs in pairs:
        torch.testing.assert_close(
            torch.as_tensor(mine),
            torch.as_tensor(theirs),
            rtol=tolerance,
            atol=tolerance / 10,
            msg=lambda text, name=name: f"{name}: {text}",
        )
