"""Gradients on their way out: own parts into `out`, foreign parts into a mailbox slot, at once.

    payload of a slot   | part for peer 0 | part for peer 1 | ...     each `part_numel` elements
    part for rank r     | w1[r] | w2[r] | b[r] | ..pad                offsets of ReduceLayout

The slot holds the reduce dtype; or the gradients' own narrower one when every element of it is
exact in the reduce dtype (bf16 in fp32), which halves what is written and read. A second arrival or
another dtype widens the slot first, in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise._torch_compat import foreach_copy
from shardwise.comm.shared_memory.control import hash_of
from shardwise.comm.shared_memory.slots import DTYPES, Slot, SlotPool
from shardwise.layout import ReduceLayout

_EXACT_IN = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
}
_ALIGN = 16

Place = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # rank, offset in its part, shape, stride


@dataclass(frozen=True, slots=True)
class ParamPlaces:
    """Where the parts of one gradient go;

    `sizes` cuts it along `dim`, `places` skips empty parts.
    """

    shape: torch.Size
    dim: int
    sizes: tuple[int, ...]
    places: tuple[Place, ...]


class Members:
    """The parameters of a bucket that a reduction is about: what ranks must have in common, and
    what one that joins without having them needs to know.
    """

    __slots__ = ("hash", "indices", "mask_words")

    def __init__(self, layout: ReduceLayout) -> None:
        self.indices, self.hash = layout.indices, hash_of(layout.indices)
        mask, num_words = sum(1 << i for i in self.indices), -(-len(layout.bucket.params) // 64)
        self.mask_words = tuple(mask >> 64 * k & (2**64 - 1) for k in range(num_words))


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """A ReduceLayout worked out for one rank of the shard axis."""

    layout: ReduceLayout
    rank: int
    params: tuple[ParamPlaces, ...]
    part_numel: int  # of every rank's part, aligned
    payload_numel: int
    own: tuple[tuple[int, int], ...]  # offset and numel of each parameter in this rank's part
    own_numel: int
    counts_offset: int  # in `out`
    members: Members

    @classmethod
    def of(cls, layout: ReduceLayout, rank: int) -> ReducePlan:
        offsets = [layout.offsets(r) for r in range(layout.world)]
        params = []
        for i, p in enumerate(layout.params):
            places = []
            for r in range(layout.world):
                if p.shard_numel(r):
                    shape = p.shard_shape(r)
                    stride = torch.empty(shape, device="meta").stride()
                    places.append((r, offsets[r][i], shape, stride))
            sizes = tuple(p.cuts.size(r) for r in range(layout.world))
            params.append(
                ParamPlaces(torch.Size(p.spec.shape), p.spec.shard_dim, sizes, tuple(places))
            )
        part_numel = -(-layout.counts_offset // _ALIGN) * _ALIGN if params else 0
        return cls(
            layout=layout,
            rank=rank,
            params=tuple(params),
            part_numel=part_numel,
            payload_numel=(layout.world - 1) * part_numel,
            own=tuple(
                (at, p.shard_numel(rank))
                for at, p in zip(offsets[rank], layout.params, strict=True)
            ),
            own_numel=layout.data_numel(rank),
            counts_offset=layout.counts_offset,
            members=Members(layout),
        )

    def position(self, rank: int, owner: int) -> int:
        """Element at which the part for `rank` starts in the payload of `owner`."""
        return (rank if rank < owner else rank - 1) * self.part_numel


class OutgoingGrads:
    """The GradBuffer of shared memory. The slot is taken when the first gradient arrives."""

    def __init__(
        self, plan: ReducePlan, pool: SlotPool, out: torch.Tensor, pre_scale: float
    ) -> None:
        if plan.layout.dtype not in DTYPES:
            raise ValueError(
                f"reduce dtype {plan.layout.dtype}: shared memory reduces "
                f"{', '.join(map(str, DTYPES))}"
            )
        self.plan = plan
        self.out = out
        self.present = [False] * len(plan.params)
        self.wire = plan.layout.dtype
        self.slot: Slot | None = None
        self._pool = pool
        self._pre_scale = pre_scale
        self._payload: torch.Tensor | None = None
        self._is_over = False

    @property
    def had(self) -> tuple[bool, ...]:
        return tuple(self.present)

    def discard(self) -> None:
        self._is_over = True
        slot, self.slot, self._payload = self.slot, None, None
        if slot is not None and slot.holder is self:
            slot.free()

    def finish(self) -> None:
        """The reduction begins: nothing may be put any more."""
        assert not self._is_over, "a gradient buffer is reduced once; get a new one"
        self._is_over = True

    def put(self, index: int, grad: torch.Tensor) -> None:
        assert not self._is_over, "a gradient buffer is reduced once; get a new one"
        places = self.plan.params[index]
        if grad.shape != places.shape:
            raise ValueError(
                f"{self.plan.layout.params[index].name}: expected a gradient of shape "
                f"{tuple(places.shape)}, found {tuple(grad.shape)}"
            )
        with torch.no_grad():
            if grad.layout is not torch.strided:
                grad = grad.to_dense()
            self._choose_wire(grad.dtype, again=self.present[index])
            sources = [grad]
            if places.shape:
                parts = grad.split_with_sizes(places.sizes, places.dim)
                sources = [parts[place[0]] for place in places.places]
            destinations = [self._view(*place) for place in places.places]
            if self.present[index]:
                for destination, source in zip(destinations, sources, strict=True):
                    destination.add_(source, alpha=self._pre_scale)
            elif sources:
                foreach_copy(destinations, sources)
                if self._pre_scale != 1.0:
                    for destination in destinations:
                        destination.mul_(self._pre_scale)
        self.present[index] = True

    def open_slot(self) -> Slot:
        """The slot; taken now when no gradient has asked for it."""
        if self.slot is None:
            plan = self.plan
            size = plan.payload_numel * plan.layout.dtype.itemsize
            self.slot = self._pool.acquire(self, len(plan.params), size)
        if self.slot.holder is not self:
            raise RuntimeError(
                "a gradient buffer serves one reduction in the phase that it was made in; get a "
                "new one with grad_buffer()."
            )
        return self.slot

    def _choose_wire(self, arriving: torch.dtype, *, again: bool) -> None:
        if self.plan.payload_numel == 0:
            return
        full = self.out.dtype
        if self._payload is not None:
            self.open_slot()
        else:
            if arriving in _EXACT_IN.get(full, ()) and self._pre_scale == 1.0:
                self.wire = arriving
            self._map_payload()
        if self.wire != full and (again or arriving != self.wire):
            assert self._payload is not None
            narrow = self._payload.clone()
            self.wire = full
            self._map_payload().copy_(narrow)

    def _map_payload(self) -> torch.Tensor:
        plan = self.plan
        slot = self.open_slot()
        self._payload = slot.payload(len(plan.params), 0, plan.payload_numel, self.wire)
        return self._payload

    def _view(
        self, rank: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        if rank == self.plan.rank:
            return self.out.as_strided(shape, stride, self.out.storage_offset() + offset)
        assert self._payload is not None
        start = self.plan.position(rank, self.plan.rank) + offset
        return self._payload.as_strided(shape, stride, start)
