"""The engines by their names on the command line. Nothing here imports torch.

    KIND[:OPTION...][@NAME=VALUE...]      shardwise:shard_grad_op:c10d, fsdp2:keep, deepspeed:3

Options may stand in any order. `@NAME=VALUE` starts that engine's ranks with an environment
variable: `shardwise@SHARDWISE_WARM_PAGES=0`, `fsdp2@MALLOC_TRIM_THRESHOLD_=2147483647`.
"""

from __future__ import annotations

import difflib
import importlib.util
from dataclasses import dataclass

from shardwise.comm.choose import names
from shardwise.errors import ConfigError
from shardwise.units import full_name

STRATEGIES = (
    "no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard",
    "hybrid_full_optimizer",
)  # fmt: skip
WIRES = ("gather_bf16", "gather_int8", "reduce_bf16", "reduce_int8")


@dataclass(frozen=True, slots=True)
class Kind:
    """What stands before the first colon."""

    about: str
    own_options: tuple[str, ...] = ()
    package: str = "torch"  # what has to be importable
    install: str = ""  # what pip calls it; empty: it comes with torch or with us
    takes_transports: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        return (*names(), *self.own_options) if self.takes_transports else self.own_options

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


KINDS: dict[str, Kind] = {
    "shardwise": Kind(
        "this project",
        (*STRATEGIES, *WIRES, "by_hosts", "keep", "last", "in_backward", "compile"),
        "shardwise",
        takes_transports=True,
    ),
    "fsdp2": Kind(
        "torch.distributed.fsdp.fully_shard",
        ("keep", "hold", "last", "hybrid", "reduce_bf16", "compile"),
    ),
    "ddp": Kind("torch DistributedDataParallel; bf16 by autocast", ("last", "compile")),
    "fsdp1": Kind("torch FullyShardedDataParallel", ("keep", "last")),
    "deepspeed": Kind("DeepSpeed ZeRO", ("1", "2", "3"), "deepspeed", "deepspeed"),
    "megatron_fsdp": Kind("Megatron-FSDP", (), "megatron_fsdp", "megatron-fsdp"),
    "fairscale": Kind("FairScale FullyShardedDataParallel", (), "fairscale", "fairscale"),
    "floor": Kind("no communication, 1/N of the optimizer's work", ("compile",)),
}
OPTIONS = {
    "keep": "parameters stay gathered between forward and backward",
    "hold": "parameters stay gathered over all micro-batches of a step",
    "last": "gradients are reduced in the last micro-batch only",
    "hybrid": "two replicas, each sharded over half of the ranks (HSDP)",
    "reduce_bf16": "fsdp2: gradients are summed in bf16; shardwise: they travel so, sums are fp32",
    "reduce_int8": "gradients travel as int8, sums are fp32 (Wire)",
    "gather_bf16": "weights travel as bf16; also gather_int8",
    "by_hosts": "two hosts of half of the ranks each: inside them first (Wire.host_ranks)",
    "in_backward": "the optimizer steps unit by unit in the backward",
    "compile": "torch.compile of each unit's forward",
    "1, 2, 3": "the ZeRO stage (2)",
}
STANDARD = (
    "shardwise", "shardwise:c10d", "shardwise:shard_grad_op", "fsdp2", "fsdp2:keep", "ddp",
    "fsdp1", "deepspeed:1", "deepspeed:2", "deepspeed:3", "megatron_fsdp", "fairscale", "floor",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine with its options; `name` is what the user wrote."""

    name: str
    kind: str
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def trains(self) -> bool:
        """False for the floor, which does not train the same model."""
        return self.kind != "floor"

    @property
    def is_foreign(self) -> bool:
        """Somebody else's package, which may refuse to run on this machine."""
        return bool(KINDS[self.kind].install)

    @property
    def missing(self) -> str:
        """How to install what is not here; empty when it is."""
        kind = KINDS[self.kind]
        return "" if kind.is_installed else f"not installed: pip install {kind.install}"

    def one_of(self, words: tuple[str, ...], default: str) -> str:
        """The option that is one of `words`."""
        return next((o for o in self.options if o in words), default)


def parse_engines(text: str) -> list[EngineSpec]:
    """Engines separated by commas; `installed`: the standard ones that are here, `all`: all."""
    specs: list[EngineSpec] = []
    for name in [word.strip() for word in text.split(",")]:
        if name in ("installed", "all"):
            standard = [parse_engine(word) for word in STANDARD]
            specs += [s for s in standard if name == "all" or not s.missing]
        else:
            specs.append(parse_engine(name))
    return list({spec.name: spec for spec in specs}.values())


def parse_engine(name: str) -> EngineSpec:
    """One engine; a `ConfigError` with the nearest name where there is none."""
    head, *variables = name.split("@")
    kind, *options = head.split(":")
    if kind not in KINDS:
        raise ConfigError(f"--engines: no engine {kind!r}; {nearest(kind, KINDS)}")
    known = KINDS[kind].options
    for i, option in enumerate(options):
        options[i] = full_name(option)
        if options[i] not in known:
            hint = nearest(option, known) if known else f"{kind} has no options"
            raise ConfigError(f"--engines: {name}: no option {option!r}; {hint}")
    for group in (names(), STRATEGIES, WIRES[:2], WIRES[2:], ("1", "2", "3")):
        if len(chosen := [o for o in options if o in group]) > 1:
            raise ConfigError(f"--engines: {name}: {' and '.join(chosen)} exclude each other")
    for variable in variables:
        if not variable.partition("=")[1]:
            raise ConfigError(f"--engines: {name}: expected @NAME=VALUE, found @{variable}")
    pairs = tuple((v.partition("=")[0], v.partition("=")[2]) for v in variables)
    return EngineSpec(name, kind, tuple(options), pairs)


def nearest(word: str, known: dict[str, Kind] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
