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
from typing import Any, Protocol, TypeVar, runtime_checkable

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

    def check(self, name: str, world: int) -> None:
        """Raise for a bucket that is laid out for another number of ranks."""
        if world != self.size:
            raise ValueError(
                f"{name}: the layout is for {world} ranks, axis {self.name!r} has {self.size}; lay "
                "the bucket out for the mesh that the transport serves."
            )


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
    """A bucket layout bound to a transport, which keeps what it needs in a subclass of its own.

    `buffer` has `layout.chunk_numel` elements of `layout.dtype`; this rank's parts lie at
    `layout.shard_offsets(rank)`.
    """

    name: str  # unit name and bucket index, e.g. "layers.3[0]"
    layout: BucketLayout
    shard: Axis
    replicate: Axis
    buffer: torch.Tensor
    streams: Streams = NO_STREAMS  # of the device that computes; the buffer may lie on the host
    number: int = 0  # tells those of one transport apart, the same on all ranks
    follows: bool = False  # its reductions follow those of another bucket: none is missed alone
    keeps_bits: bool = False  # gathered exactly, whatever wire format its layout has

    def views_of(self, out: torch.Tensor) -> int:
        """How many views of what is gathered to it keeps: none of them is a user's."""
        return 0

    def separate_reductions(self, enable: bool) -> None:
        """Reductions have a communicator of their own, where gathers have one. A collective."""

    def allocate_by_group(self, enable: bool) -> None:
        """Staging lies in memory of the process group's backend, where that has some."""

    def gather_symmetrically(self, backend: str) -> None:
        """Gather in symmetric memory of a backend."""
        raise NotImplementedError(f"{self.name}: its transport has no symmetric memory; use c10d")

    def use_collective(self, kind: str, comm: Any) -> None:
        """Move it with the user's own "all_gather" or "reduce_scatter" from now on."""
        raise NotImplementedError(f"{self.name}: its transport takes no collectives of users")


@dataclass(frozen=True, slots=True)
class Missing:
    """A reduction that peers have and this rank has not: of which bucket, about which of its
    parameters; None: about those that this rank trains.
    """

    bucket: Bucket
    indices: tuple[int, ...] | None = None


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
    """Collects the full gradients of one reduction as they arrive. It may have `pack`: called on
    accelerators when all have, on the stream that they came on; `reduce` is called on a lane.
    """

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


B = TypeVar("B", bound=Bucket)


@runtime_checkable
class Transport(Protocol[B]):
    """What the engine asks of a transport, whose buckets are of its own type.

    `out` of `gather` is flat, `layout.full_numel` elements of `gather_dtype`; `out` of `reduce` is
    flat, `ReduceLayout.chunk_numel` elements of `reduce_dtype`, with the counts at its end.

    Behaviour goes by capabilities, never by a name. An object without them, or without the methods
    that have a body here, gets these (`ordered.Guarded`).
    """

    name: str
    is_ordered: bool = True  # all ranks issue the same in the same order; else see `missing`
    reads_at_any_time: bool = False  # peers read a shard without its owner's doing
    takes_custom_collectives: bool = False  # its buckets have `use_collective`
    sums_in_tree: bool = False  # it has the methods of `TreeTransport`
    takes_bytes: bool = False  # it gathers what is not in the bucket's buffer, of any dtype
    takes_wires: bool = False  # it moves by the wire formats of layouts
    has_peers: bool = True  # ranks meet in it
    sums_late: bool = False  # `grad_buffer` wants of `out` no more than its dtype and device
    checks_order: bool = False  # ... and it tells by itself when they issue different collectives

    def attach(self, name: str, layout: BucketLayout, device: torch.device) -> B: ...

    def gather(self, bucket: B, shard: torch.Tensor, out: torch.Tensor) -> Handle: ...

    def grad_buffer(
        self, bucket: B, layout: ReduceLayout, out: torch.Tensor, pre_scale: float = 1.0
    ) -> GradBuffer: ...

    def reduce(self, bucket: B, grads: GradBuffer, out: torch.Tensor, scale: float) -> Handle: ...

    def all_reduce(self, bucket: B, out: torch.Tensor) -> Handle: ...

    def enter(self, position: Position) -> None: ...

    def leave(self, position: Position) -> None: ...

    def abandon(self) -> None: ...

    def agree(self, flags: list[bool]) -> list[bool]: ...

    def close(self) -> None: ...

    @property
    def phases(self) -> object:
        """What `enter` and `leave` are about: transports of one set of ranks may share it."""
        return self

    def give_up(self) -> None:
        """Tell peers that `abandon` follows, without waiting for them."""
        return None

    def missing(self, position: Position) -> list[Missing]:
        """What peers reduce in this phase and this rank has not, in an order of all ranks.

        Where reductions have no order, each rank reduces in its own, may leave out units that
        others reduce, and has to learn of them. At the end of a backward, before it waits for any
        reduction and before `leave`:

            while missing := transport.missing(position):
                reduce each bucket with a GradBuffer that nothing was put into (and all_reduce it)

        Returns as soon as it knows some; nothing once all ranks have called it and none is left.
        Earlier in the backward no reduction may be waited for, unless its handle is `done`: a peer
        may get to know only at its own end that it has to take part. What is in flight is bounded
        by the transport, not by the engine: `reduce` and `put` complete others' reductions while
        they wait.
        """
        return []


def abandon_all(transports: Iterable[Transport]) -> None:
    """An exception ended a phase of each. Peers may wait in any of them, so those that wait for
    peers when they abandon say so first in all (`give_up`).
    """
    transports = list(transports)
    for transport in transports:
        transport.give_up()
    for transport in transports:
        transport.abandon()
