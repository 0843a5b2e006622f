"""Wire formats: how parameters and gradients travel between ranks, and what that costs.

    exact   as they are
    bf16    2 bytes an element
    int8    1 byte an element and a float32 scale for each block: code = round(x / scale),
            scale = largest |x| of the block / 127

A format is a number of bytes and an error, known before anything moves: `layout` plans by it,
`comm.wires` encodes by it. Sums are taken in float32 whatever travels. Idea: ZeRO++ (Wang et al.
2023, arXiv 2306.10209), block quantisation of Dettmers et al. (2021, arXiv 2110.02861).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.layout.strategy import Strategy

FORMATS = ("exact", "bf16", "int8")
AXES = ("auto", "shard", "replicate", "both")
PIECE_BYTES = 16  # what one rank sends another is a multiple of it
SCALE_BYTES = 4
_ROUNDED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Format:
    """What travels; `block`: elements that share a scale."""

    name: str = "exact"
    block: int = 128

    @property
    def is_lossy(self) -> bool:
        return self.name != "exact"

    def num_bytes(self, numel: int, itemsize: int, num_counts: int = 0) -> int:
        """Of a piece of `numel` elements of `itemsize` bytes, with a byte behind it for each of
        `num_counts` counts.
        """
        if self.name == "int8":
            size = numel + SCALE_BYTES * -(-numel // self.block)
        else:
            size = numel * (2 if self.name == "bf16" else itemsize)
        return -(-(size + num_counts) // PIECE_BYTES) * PIECE_BYTES

    def for_weights(self, dtype: torch.dtype) -> Format:
        """The same where it rounds weights of a dtype and makes them shorter; else exact."""
        is_shorter = self.name == "int8" or dtype.itemsize > 2
        return self if dtype in _ROUNDED and is_shorter else EXACT

    def for_sums(self, dtype: torch.dtype) -> Format:
        """The same where it carries gradients of a dtype; bfloat16 gains sums in float32."""
        fits = self.name == "int8" or dtype is not torch.float16
        return self if dtype in _ROUNDED and fits else EXACT

    @property
    def error(self) -> str:
        """The bound of what one rounding adds, in words."""
        if self.name == "bf16":
            return "each at most 2^-8 (0.4%) of itself"
        if self.name == "int8":
            return f"each at most 1/254 (0.4%) of the largest of its {self.block}"
        return "none"


EXACT = Format()


@dataclass(frozen=True, slots=True)
class AxisWire:
    """What travels over one axis; `host_ranks` > 1: inside hosts of so many ranks first."""

    gather: Format = EXACT
    reduce: Format = EXACT
    feeds_back: bool = False  # what rounding gradients lost is added to the next ones
    host_ranks: int = 0

    @property
    def is_lossy(self) -> bool:
        return self.gather.is_lossy or self.reduce.is_lossy


@dataclass(frozen=True, slots=True)
class BucketWire:
    """What travels of one bucket, axis by axis."""

    shard: AxisWire = AxisWire()
    replicate: AxisWire = AxisWire()


PLAIN = BucketWire()


@dataclass(frozen=True)
class Wire:
    """How a unit's parameters and gradients travel between ranks: exactly, if nothing is said.

    Attributes:
        gather: format of gathered weights, "exact", "bf16" or "int8". Every rank computes with the
            rounded values, its own part included; shards stay as they are. Frozen parameters and
            those of other dtypes than float32, bfloat16 and float16 are gathered exactly.
        reduce: format of gradients on their way to their owner, who adds them up in float32, in
            the order of ranks.
        axis: where reductions are rounded on meshes with replicas: "auto" is "replicate" there
            (the link between hosts, mostly); else "shard", "replicate" or "both". Gathers are
            rounded on the axis that they cross.
        block: elements that share a scale ("int8"), a multiple of 16.
        error_feedback: what rounding lost is added to the next gradients. Costs a float32 buffer
            of the size of what this rank sends.
        host_ranks: above 1, so many neighbouring ranks of the shard axis are taken for one host:
            gradients are added up inside it before they leave it, weights enter it once for each
            of its ranks.
    """

    gather: str = "exact"
    reduce: str = "exact"
    axis: str = "auto"
    block: int = 128
    error_feedback: bool = False
    host_ranks: int = 0

    def __post_init__(self) -> None:
        for key in ("gather", "reduce"):
            if getattr(self, key) not in FORMATS:
                known = ", ".join(FORMATS)
                raise ValueError(f"Wire.{key}: {getattr(self, key)!r} is none of {known}")
        if self.axis not in AXES:
            raise ValueError(f"Wire.axis: {self.axis!r} is none of {', '.join(AXES)}")
        for key in ("block", "host_ranks"):
            if type(getattr(self, key)) is not int or getattr(self, key) < 0:
                raise ValueError(f"Wire.{key}: expected a number, found {getattr(self, key)!r}")
        if self.block < PIECE_BYTES or self.block % PIECE_BYTES:
            raise ValueError(f"Wire.block: {self.block} is no multiple of {PIECE_BYTES}; try 128")
        if self.error_feedback and self.reduce == "exact":
            raise ValueError(
                "Wire.error_feedback: nothing is lost with reduce='exact'; take reduce='int8' or "
                "'bf16', or leave it out"
            )

    @property
    def is_plain(self) -> bool:
        """All travels as without a wire format, by the usual collectives."""
        return not self.is_lossy and self.host_ranks < 2

    @property
    def is_lossy(self) -> bool:
        return self.gather != "exact" or self.reduce != "exact"

    @property
    def text(self) -> str:
        """In a few words."""
        parts = [f"{key} {getattr(self, key)}" for key in ("gather", "reduce")]
        parts = [part for part in parts if not part.endswith("exact")]
        parts += ["error feedback"] if self.error_feedback else []
        parts += [f"hosts of {self.host_ranks}"] if self.host_ranks > 1 else []
        return ", ".join(parts) or "exact"

    @property
    def error(self) -> str:
        """What rounding adds to one step's weights and gradients, in words."""
        found = []
        for what, name in (("weights in use", self.gather), ("gradients", self.reduce)):
            if name != "exact":
                found.append(f"{what} {Format(name, self.block).error}")
        if self.error_feedback:
            found.append("and what gradients lose is added to the next ones")
        return "; ".join(found) or "nothing is rounded"

    def check(self, strategy: Strategy, world: int, replicas: int) -> None:
        """Raise ValueError where it has no effect or no meaning; `world`, `replicas`: ranks of the
        two axes.
        """
        has_replicas = strategy.is_hybrid or strategy.shard is None
        if self.axis in ("replicate", "both") and not has_replicas:
            raise ValueError(
                f"Wire.axis={self.axis!r}: {strategy.name} has no replicate axis; leave it 'auto'"
            )
        if self.axis in ("shard", "both") and strategy.shard is None:
            raise ValueError(
                f"Wire.axis={self.axis!r}: {strategy.name} has no shard axis; leave it 'auto'"
            )
        if self.gather != "exact" and strategy.shard is None:
            raise ValueError(
                f"Wire.gather={self.gather!r}: {strategy.name} gathers nothing; leave it 'exact'"
            )
        is_last = self.axis == "replicate" and not strategy.splits_replicas
        if self.gather != "exact" and is_last:
            raise ValueError(
                f"Wire.gather={self.gather!r}: {strategy.name} gathers over its shard axis only; "
                "take axis='auto', or gather='exact'"
            )
        if self.host_ranks > 1 and has_replicas:
            raise ValueError(
                f"Wire.host_ranks={self.host_ranks}: {strategy.name} has an axis inside hosts and "
                "one between them; leave it out, or use full_shard"
            )
        if 1 < self.host_ranks < world and world % self.host_ranks:
            raise ValueError(
                f"Wire.host_ranks={self.host_ranks}: is no factor of the {world} ranks that a "
                "unit is sharded over"
            )

    def of_bucket(
        self,
        strategy: Strategy,
        gather_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        *,
        rounds: bool,
        world: int,
    ) -> BucketWire:
        """What travels of a bucket; `rounds`: its weights train, so they may be rounded."""
        if self.is_plain:
            return PLAIN
        gather = Format(self.gather, self.block).for_weights(gather_dtype) if rounds else EXACT
        reduce = Format(self.reduce, self.block).for_sums(reduce_dtype)
        over_replicas = strategy.is_hybrid or strategy.shard is None
        axis = self.axis
        if axis == "auto":
            axis = "replicate" if over_replicas else "shard"
        host_ranks = self.host_ranks if 1 < self.host_ranks < world else 0
        gathers_on = axis if strategy.splits_replicas else "shard"

        def on(name: str, host_ranks: int) -> AxisWire:
            sums = reduce if axis in (name, "both") else EXACT
            weights = gather if gathers_on in (name, "both") else EXACT
            return AxisWire(weights, sums, self.error_feedback and sums.is_lossy, host_ranks)

        return BucketWire(on("shard", host_ranks), on("replicate", 0))
