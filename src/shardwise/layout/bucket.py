"""Layout of a bucket: where every parameter lies in the shard buffer and in the gathered buffer.

    shard buffer     | w1[r] ..pad | w2[r] ..pad | b[r] ..pad | ..pad to chunk |   stored dtype
    gathered buffer  | w1 whole ..pad | w2 whole ..pad | b whole ..pad         |   gather dtype

The gathered buffer is parameter-major: every parameter is whole and contiguous in it. Offsets are
multiples of `ALIGN` elements, so that a rank's part starts where vector units like it; small parts
are packed tight instead. All shard buffers have the size of the largest one (`chunk_numel`),
so a rank's buffer is what a collective sends as it is.

On accelerators, where each copy is a launch, parameters whose last parts have fewer rows than the
first are padded to equal parts (`pads_rows`), if that makes all parts of the bucket equal: one
launch moves the whole bucket then, as it does where all cuts are even.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from shardwise.layout.cuts import Cuts
from shardwise.layout.wire import PLAIN, BucketWire

ALIGN = 16
SMALL_PADDING_BYTES = 2**20  # about what 10 GB/s move in the latency of a few collectives


SMALL = 16 * ALIGN


def aligned(numel: int) -> int:
    """`numel` rounded up to the alignment."""
    return -(-numel // ALIGN) * ALIGN


def place(at: int, numel: int) -> int:
    """Where a part of `numel` elements starts when `at` is the first free element.

    Small parts (biases, norms) are packed tight: aligning them would pad more than it gains.
    """
    return at if numel < SMALL else aligned(at)


def padding_pays(padded_numel: int, exact_numel: int, dtype: torch.dtype) -> bool:
    """True when one padded collective beats one collective per rank of exact size.

    One collective has one latency and every rank sends at once, so padding is preferred until it is
    half as much again as the data itself (a matrix owned whole by one of N ranks pads to N times
    its size), and always while it is small: a bias with fewer elements than there are ranks must
    not cost a broadcast per element.
    """
    padding = padded_numel - exact_numel
    return 2 * padding <= exact_numel or padding * dtype.itemsize <= SMALL_PADDING_BYTES


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the layout has to know of a parameter; `cuts=None` means even cuts of `shard_dim`.

    What moves and adds up is real: a complex parameter has its real dtype here and a last dim of 2.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    shard_dim: int = 0
    cuts: Cuts | None = None
    is_complex: bool = False
    keeps_dtype: bool = False  # whatever a policy says of the gathered copy
    grad_dtype: torch.dtype | None = None  # of `.grad`, where the user asked for another

    @classmethod
    def of(
        cls,
        name: str,
        shape: tuple[int, ...],
        param: torch.Tensor,
        *,
        shard_dim: int = 0,
        cuts: Cuts | None = None,
        keeps_dtype: bool = False,
    ) -> ParamSpec:
        """That of a parameter; `shape` is that of the part which is cut."""
        dtype, grad_dtype, is_complex = param.dtype, param.grad_dtype, param.dtype.is_complex
        grad_dtype = None if grad_dtype == dtype else grad_dtype
        if is_complex:
            dtype, shape = dtype.to_real(), (*shape, 2)
            grad_dtype = grad_dtype and grad_dtype.to_real()
        keeps_dtype = keeps_dtype or is_complex
        trains = param.requires_grad
        return cls(name, shape, dtype, trains, shard_dim, cuts, is_complex, keeps_dtype, grad_dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """One parameter in its bucket. Offsets count elements, rows are those of the cut dim."""

    spec: ParamSpec
    cuts: Cuts
    full_offset: int
    is_padded: bool = False  # all parts take the space of the first, which is the largest

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def numel(self) -> int:
        return self.spec.numel

    @property
    def outer(self) -> int:
        return math.prod(self.spec.shape[: self.spec.shard_dim])

    @property
    def rows(self) -> int:
        return self.cuts.rows

    @property
    def inner(self) -> int:
        return math.prod(self.spec.shape[self.spec.shard_dim + 1 :])

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the part that `rank` owns."""
        if not self.spec.shape:
            return () if self.cuts.size(rank) else (0,)
        dim = self.spec.shard_dim
        return (*self.spec.shape[:dim], self.cuts.size(rank), *self.spec.shape[dim + 1 :])

    def shard_numel(self, rank: int) -> int:
        return self.outer * self.cuts.size(rank) * self.inner

    def rows_of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of a whole tensor that `rank` owns, as a view; of one without dims, an element
        or none.
        """
        if not self.spec.shape:
            return whole.view(1)[: self.cuts.size(rank)]
        return whole.narrow(self.spec.shard_dim, self.cuts.start(rank), self.cuts.size(rank))

    def part_in(self, buffer: torch.Tensor, at: int, rank: int) -> torch.Tensor:
        """The part that `rank` owns where it lies in a flat buffer, as a view."""
        return buffer[at : at + self.shard_numel(rank)].view(self.shard_shape(rank))

    @property
    def is_regular(self) -> bool:
        """The whole is its parts end to end, which take equal space."""
        return self.outer == 1 and (self.is_padded or self.cuts.is_exact)

    def spaces(self) -> list[int]:
        """Elements that the part of every rank takes in a buffer: `shard_numel`, or padded."""
        if self.is_padded:
            return [self.shard_numel(0)] * self.cuts.world
        row = self.outer * self.inner
        return [row * (stop - start) for start, stop in pairwise(self.cuts.bounds)]

    @property
    def full_space(self) -> int:
        """Elements that the whole takes in the gathered buffer."""
        return self.cuts.world * self.shard_numel(0) if self.is_padded else self.numel


@dataclass(frozen=True)
class BucketLayout:
    """Parameters of a unit that share axes and dtypes: one buffer, one collective.

    No slots: what depends on all ranks is computed once, since steps ask for it and there may be
    thousands of ranks.
    """

    params: tuple[ParamLayout, ...]
    dtype: torch.dtype
    gather_dtype: torch.dtype
    reduce_dtype: torch.dtype
    world: int
    replicas: int = 1
    wire: BucketWire = PLAIN

    @cached_property
    def is_complex(self) -> bool:
        """Pairs of its elements are complex numbers."""
        return self.params[0].spec.is_complex

    @cached_property
    def grad_dtype(self) -> torch.dtype:
        """Of the gradients that it delivers."""
        return self.params[0].spec.grad_dtype or self.dtype

    @cached_property
    def full_numel(self) -> int:
        """Elements of the gathered buffer, padding included."""
        return self.params[-1].full_offset + self.params[-1].full_space if self.params else 0

    def shard_offsets(self, rank: int) -> tuple[int, ...]:
        """Offset of every parameter in the shard buffer of `rank`."""
        return self._packings[rank][0]

    def shard_numel(self, rank: int) -> int:
        """Elements of the shard buffer that `rank` fills, padding included."""
        return self._packings[rank][1]

    @cached_property
    def _packings(self) -> list[tuple[tuple[int, ...], int]]:
        """For every rank the offsets of its parts, and where they end."""
        return pack_parts(self.params, self.world, place)

    @cached_property
    def chunk_numel(self) -> int:
        """Elements of every rank's shard buffer: the largest `shard_numel`."""
        return max(end for _, end in self._packings)

    @cached_property
    def is_rank_major(self) -> bool:
        """True when the gathered buffer is the shard buffers end to end: gathered in place."""
        if self.world == 1:
            return True
        if len(self.params) != 1:
            return False
        return self.params[0].is_regular

    @cached_property
    def is_regular(self) -> bool:
        """All its parameters are, so one call packs or unpacks them."""
        return all(p.is_regular for p in self.params)

    @cached_property
    def sends_padded(self) -> bool:
        """True when one padded all-gather is preferred over a broadcast of each exact part."""
        exact = sum(end for _, end in self._packings)
        return padding_pays(self.world * self.chunk_numel, exact, self.gather_dtype)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank puts into a gather."""
        form, itemsize = self.wire.shard.gather, self.gather_dtype.itemsize
        if form.is_lossy:
            return form.num_bytes(self.chunk_numel, itemsize)
        return self.chunk_numel * itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes that each rank keeps."""
        return self.chunk_numel * self.dtype.itemsize

    @cached_property
    def full_bytes(self) -> int:
        """Bytes of the gathered copy."""
        return self.full_numel * self.gather_dtype.itemsize

    @property
    def needs_cast(self) -> bool:
        return self.gather_dtype != self.dtype


def pack_parts(
    params: Sequence[ParamLayout], world: int, place: Callable[[int, int], int]
) -> list[tuple[tuple[int, ...], int]]:
    """For every rank the offsets of its parts of the parameters, and where the last one ends.

    `place(at, numel)` is where a part starts when `at` is free. Most ranks own equally much of
    everything: they share one result.
    """
    if not params:
        return [((), 0)] * world
    known: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
    packings = []
    is_alike = all(p.is_padded or p.cuts.is_exact for p in params)
    every = zip(*([p.shard_numel(0)] if is_alike else p.spaces() for p in params), strict=True)
    for sizes in every:
        if sizes not in known:
            offsets, at = [], 0
            for numel in sizes:
                offsets.append(place(at, numel))
                at = offsets[-1] + numel
            known[sizes] = (tuple(offsets), at)
        packings.append(known[sizes])
    return packings * world if is_alike else packings


def layout_bucket(
    specs: Sequence[ParamSpec],
    *,
    gather_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    world: int,
    replicas: int = 1,
    pads_rows: bool = False,
    wire: BucketWire = PLAIN,
) -> BucketLayout:
    """Pack parameters of one stored dtype in the order given. `pads_rows`: see the module."""
    dtypes = {s.dtype for s in specs}
    if len(dtypes) != 1:
        raise ValueError(f"a bucket holds one stored dtype, found {sorted(map(str, dtypes))}")
    unplaced = [ParamLayout(spec, _cuts_of(spec, world), 0) for spec in specs]
    if pads_rows and all(p.is_regular or _is_to_pad(p) for p in unplaced):  # else it saves nothing
        unplaced = [replace(p, is_padded=not p.is_regular) for p in unplaced]
    params, at = [], 0
    for param in unplaced:
        params.append(replace(param, full_offset=place(at, param.full_space)))
        at = params[-1].full_offset + param.full_space
    dtype = dtypes.pop()
    return BucketLayout(tuple(params), dtype, gather_dtype, reduce_dtype, world, replicas, wire)


def group_by_dtype(
    specs: Iterable[ParamSpec],
    gather_dtype_of: dict[str, torch.dtype],
    reduce_dtype_of: dict[str, torch.dtype],
    rounded: Container[str] = (),
) -> list[list[ParamSpec]]:
    """Parameters in groups of equal dtypes (stored, gather, reduce, gradient), complex ones by
    themselves, and those whose weights travel `rounded`; each group where its first was.
    """
    groups: dict[tuple[torch.dtype | bool | None, ...], list[ParamSpec]] = {}
    for spec in specs:
        gather, reduce = gather_dtype_of[spec.name], reduce_dtype_of[spec.name]
        is_rounded = spec.name in rounded
        key = (spec.is_complex, spec.dtype, gather, reduce, spec.grad_dtype, is_rounded)
        groups.setdefault(key, []).append(spec)
    return list(groups.values())


def _is_to_pad(param: ParamLayout) -> bool:
    """Cut as DTensor cuts: only the last parts are smaller, and what that pads is little."""
    spec, cuts = param.spec, param.cuts
    if spec.cuts is not None or not spec.shape or param.outer != 1:
        return False
    return padding_pays(cuts.world * param.shard_numel(0), param.numel, spec.dtype)


def _cuts_of(spec: ParamSpec, world: int) -> Cuts:
    if not spec.shape:
        cuts, rows = spec.cuts or Cuts.whole(1, world, 0), 1
    else:
        if not 0 <= spec.shard_dim < len(spec.shape):
            raise ValueError(
                f"{spec.name}: shard dim {spec.shard_dim} is outside the {len(spec.shape)} dims "
                f"of {spec.shape}; "
                f"choose one of 0 to {len(spec.shape) - 1}"
            )
        rows = spec.shape[spec.shard_dim]
        cuts = spec.cuts or Cuts.even(rows, world)
    if cuts.world != world or cuts.rows != rows:
        raise ValueError(
            f"{spec.name}: cuts for {cuts.rows} rows on {cuts.world} ranks do not fit {rows} rows "
            f"on {world} ranks"
        )
    return cuts
