"""What is verified: a user's configuration made small, and the ways in which its ranks are run.

What is changed, since it decides nothing about right or wrong or would hide it: few steps from a
constant learning rate, small batches, no clipping, no evaluation, float32. The built-in decoder and
its sequences are shrunk; a model of one's own stays as it is. Everything else (model, data, seed,
units, optimizer) is the configuration's. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.train.config import (
    Config,
    DecoderConfig,
    ReplicasConfig,
    StrategyName,
    is_factory,
)
from shardwise.train.config_file import LoadedConfig
from shardwise.units import counted

STRATEGIES: tuple[StrategyName, ...] = (
    "full_shard",
    "shard_grad_op",
    "shard_optimizer",
    "no_shard",
    "hybrid_shard",
)
_MICRO_BATCH = 4
_REPLICAS = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the ranks."""

    num_ranks: int
    strategy: StrategyName = "full_shard"
    transport: str = "auto"

    def __str__(self) -> str:
        ranks = counted(self.num_ranks, "rank")
        return f"{ranks}, {self.strategy}, {self.transport}"


@dataclass(frozen=True, slots=True)
class Plan:
    """`folder` takes the baseline's numbers and the checkpoints; `is_exact`: to the last bit."""

    loaded: LoadedConfig
    ranks: tuple[int, ...]
    strategies: tuple[StrategyName, ...]
    transports: tuple[str, ...]
    num_steps: int
    folder: Path
    is_exact: bool = True

    @property
    def num_micro_batches(self) -> int:
        """Of a step over all ranks: every number of ranks gets equally many."""
        return math.lcm(*self.ranks, 2)

    @property
    def search_dir(self) -> Path | None:
        return self.loaded.path.parent if self.loaded.path else None

    def config(self, variant: Variant, run_dir: str) -> LoadedConfig:
        """The configuration of one run."""
        config = shrunk(self.loaded.config, self.num_steps, self.num_micro_batches)
        replicas = _REPLICAS if variant.strategy == "hybrid_shard" else 1
        level = "any_world" if self.is_exact else "off"
        config = replace(
            config,
            run=replace(config.run, dir=str(self.folder / run_dir), reproducible=level),
            shard=replace(config.shard, strategy=variant.strategy, transport=variant.transport),
            mesh=replace(config.mesh, replicate=replicas, shard=-1, tensor=1),
            replicas=ReplicasConfig(),
        )
        return replace(self.loaded, config=config)

    def variants(self) -> list[Variant]:
        """One rank first, then each strategy and transport on each number of ranks above one."""
        found = [Variant(1)]
        for n in self.ranks:
            for strategy in self.strategies if n > 1 else ():
                if strategy == "hybrid_shard" and (n % _REPLICAS or n == _REPLICAS):
                    continue  # a shard axis of one rank is no_shard
                found += [Variant(n, strategy, transport) for transport in self.transports]
        return found


def shrunk(config: Config, num_steps: int, num_micro_batches: int) -> Config:
    """The small job; see the module docstring."""
    micro = min(config.train.micro_batch, _MICRO_BATCH)
    if isinstance(config.model, DecoderConfig):
        config = replace(config, model=_small_decoder(config.model))
    if not is_factory(config.data.source):
        config = replace(config, data=replace(config.data, seq_len=min(config.data.seq_len, 32)))
    return replace(
        config,
        run=replace(config.run, device="cpu", threads=1),
        train=replace(
            config.train,
            steps=num_steps,
            micro_batch=micro,
            global_batch=micro * num_micro_batches,
            grad_clip=0.0,
            eval_every=0,
        ),
        optim=replace(config.optim, warmup_steps=0, schedule="constant", in_backward=False),
        shard=replace(
            config.shard,
            param_dtype="float32",
            reduce_dtype="float32",
            gather_wire="exact",  # these round, which is no mistake of the engine
            reduce_wire="exact",
            error_feedback=False,
            host_ranks=0,
            overrides=(),  # the variant says what is run
            compile=False,  # other kernels than the baseline's
            offload_activations=False,
        ),
        checkpoint=replace(
            config.checkpoint,
            every=0,
            memory_every=0,
            resume="auto",
            background=False,
            rehearsal=False,
        ),
    )


def _small_decoder(model: DecoderConfig) -> DecoderConfig:
    if model.dim <= 64 and model.layers <= 2:
        return model
    grouped = model.num_kv_heads != model.heads
    kv_heads = 1 if grouped else 0
    return replace(model, dim=32, layers=2, heads=2, kv_heads=kv_heads, hidden=0)


@dataclass(slots=True)
class Row:
    """One line of the result. `detail`: what differs first, or the tolerance that it passed."""

    rung: str
    what: str
    result: str = "PASS"  # PASS, FAIL or SKIP
    detail: str = ""
    step_s: float | None = None
    waiting: float | None = None  # share of the step
    moved_bytes: int | None = None
    peak_bytes: int | None = None
