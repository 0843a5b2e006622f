"""The seam between engine and communication: what a transport does, and what it is given.

    gather(bucket, shard, out) -> Handle             sharded buffer -> gathered buffer
    grad_buffer(bucket, layout, out) -> GradBuffer   where gradients of one reduction are put
    reduce(bucket, grads, out, scale) -> Handle      full gradients -> own shard of the sum, scaled
    all_reduce(bucket, out) -> Handle                the same over the replicate axis, on that shard
    enter(position) / leave(position) / abandon()    control passes from user to engine and back
    agree(flags) -> flags                            "or" over all ranks, of facts that steer them

A transport gets the layout and does the whole movement, so that each can avoid copies in its own
way. It serves one mesh (a shard axis and a replicate axis); a bucket is bound to it once by
`attach`, which also allocates the shard buffer, because some transports need it in memory that
peers can read. All ranks attach the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
import torch.distributed as dist

from shardwise.comm.streams import NO_STREAMS, Streams
from shardwise.layout import BucketLayout, ReduceLayout


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis as a transport sees it: global `ranks`, and `rank`, this process's place."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is, for fences and for error texts."""

    step: int
    phase: str  # "forward" | WITHOUT_GRADIENTS | "backward" | "unshard" | "state_dict" | ...
    unit: str

    @property
    def text(self) -> str:  # a pass: a step of the optimizer may have several backwards
        return f"pass {self.step}, {self.phase}{f', unit {self.unit!r}' if self.unit else ''}"


WITHOUT_GRADIENTS = "forward without gradients"


def remark_on(*phases: str) -> str:
    """What explains best that ranks met in these phases."""
    if len(set(phases)) == 1 or WITHOUT_GRADIENTS not in phases:
        return ""
    return (
        f" Copies that are kept serve a {WITHOUT_GRADIENTS} by themselves; a rank enters one with "
        "the others only when it has written to its parameters since (or has released them): do "
        "so on all ranks, or on none."
    )


def how_to_differ(position: Position | None) -> str:
    """What a rank that waits in a forward without gradients should know."""
    if position is None or position.phase != WITHOUT_GRADIENTS:
        return ""
    return (
        " Ranks may run different numbers of forwards without gradients (generation, evaluation on "
        "one rank) where copies are kept: strategy='shard_grad_op', reshard_after_forward=False, "
        "or unshard() of all units before; else run equally many on all ranks."
    )


@dataclass(slots=True, eq=False, weakref_slot=True)
class Bucket:
    """A bucket layout bound to a transport: name, flat shard buffer, the transport's own state.

    `buffer` has `layout.chunk_numel` elements of `layout.dtype`; this rank's parts lie at
    `layout.shard_offsets(rank)`.
    """

    name: str  # unit name and bucket index, e.g. "layers.3[0]"
    layout: BucketLayout
    shard: Axis
    replicate: Axis
    buffer: torch.Tensor
    private: dict[str, Any] = field(default_factory=dict)
    streams: Streams = NO_STREAMS  # of the device that computes; the buffer may lie on the host


class Handle(Protocol):
    """A movement that was issued. `wait` returns when the current stream may use its result.

    Waiting twice is harmless. A handle may have `done`: True when `wait` would return at once.
    """

    def wait(self) -> None: ...


class Done:
    """The handle of what is already finished."""

    done = True

    def wait(self) -> None:
        return None


DONE = Done()


class GradBuffer(Protocol):
    """Collects the full gradients of one reduction as they arrive."""

    def put(self, index: int, grad: torch.Tensor) -> None:
        """Gradient of `layout.params[index]`: full shape, any float dtype. A second one adds."""
        ...

    @property
    def had(self) -> tuple[bool, ...]:
        """For which parameters `put` was called."""
        ...

    def discard(self) -> None:
        """Give the buffer back unused (an exception ended the backward)."""
        ...


@runtime_checkable
class Transport(Protocol):
    """What the engine asks of a transport.

    `out` of `gather` is flat, `layout.full_numel` elements of `gather_dtype`; `out` of `reduce` is
    flat, `ReduceLayout.chunk_numel` elements of `reduce_dtype`, with the counts at its end.
    """

    name: str

    def attach(self, name: str, layout: BucketLayout, device: torch.device) -> Bucket: ...

    def gather(self, bucket: Bucket, shard: torch.Tensor, out: torch.Tensor) -> Handle: ...

    def grad_buffer(
        self, bucket: Bucket, layout: ReduceLayout, out: torch.Tensor, pre_scale: float = 1.0
    ) -> GradBuffer: ...

    def reduce(
        self, bucket: Bucket, grads: GradBuffer, out: torch.Tensor, scale: float
    ) -> Handle: ...

    def all_reduce(self, bucket: Bucket, out: torch.Tensor) -> Handle: ...

    def enter(self, position: Position) -> None: ...

    def leave(self, position: Position) -> None: ...

    def abandon(self) -> None: ...

    def agree(self, flags: list[bool]) -> list[bool]: ...

    def close(self) -> None: ...


@runtime_checkable
class Unordered(Protocol):
    """What a transport adds whose reductions have no order: each rank reduces in its own.

    A rank may then leave out units that others reduce, and has to learn of them. At the end of a
    backward, before it waits for any reduction and before `leave`:

        while buckets := missing_of(transport, position):
            reduce each of them with a GradBuffer that nothing was put into (and all_reduce it)

    Earlier in the backward no reduction may be waited for, unless its handle is `done`: a peer may
    get to know only at its own end that it has to take part. What is in flight is bounded by the
    transport, not by the engine: `reduce` and `put` complete others' reductions while they wait.
    """

    def missing(self, position: Position) -> list[Bucket]:
        """Buckets that peers reduce in this phase and this rank has not, in an order of all ranks.

        Returns as soon as it knows some; nothing once all ranks have called it and none is left.
        """
        ...


def is_unordered(transport: Transport) -> TypeGuard[Unordered]:
    """The same as `isinstance`, which takes 100 times as long and is asked for each unit."""
    return hasattr(transport, "missing")


def phases_of(transport: Transport) -> object:
    """What its `enter` and `leave` are about: the transport, unless several of one set of ranks
    share their phases (`phases`).
    """
    return getattr(transport, "phases", transport)


def abandon_all(transports: Iterable[Transport]) -> None:
    """An exception ended a phase of each. Peers may wait in any of them, so those that wait for
    peers when they abandon say so first in all (`give_up`).
    """
    transports = list(transports)
    for transport in transports:
        if hasattr(transport, "give_up"):
            transport.give_up()
    for transport in transports:
        transport.abandon()


def missing_of(transport: Transport, position: Position) -> list[Bucket]:
    """What `transport` is missing; nothing where all ranks issue in the same order anyway."""
    return transport.missing(position) if is_unordered(transport) else []
