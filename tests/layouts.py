"""Buckets for tests: hypothesis strategies, seeded ones for ranks, whole <-> shard by hand.

The helpers that move data are deliberately simple, one parameter and one rank at a time: they are
what the strided moves of `shardwise.layout` and the transports are compared with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from shardwise.layout import BucketLayout, Cuts, ParamLayout, ParamSpec, layout_bucket

WORLDS = st.integers(1, 17)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STORED = (*FLOATS, torch.float8_e4m3fn, torch.int16, torch.uint8, torch.bool)
SIZES = (0, 1, 2, 3, 5, 7, 8, 16, 17, 33)


@st.composite
def cuts_of(draw: st.DrawFn, rows: int, world: int) -> Cuts:
    """Any of the three kinds of cuts."""
    kind = draw(st.sampled_from(("even", "block", "whole")))
    if kind == "even":
        return Cuts.even(rows, world)
    if kind == "block":
        return Cuts.block(rows, world, draw(st.integers(1, 8)))
    return Cuts.whole(rows, world, draw(st.integers(0, world - 1)))


@st.composite
def specs_of(draw: st.DrawFn, world: int, dtype: torch.dtype, index: int) -> ParamSpec:
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), max_size=4)))
    dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
    cuts = draw(st.one_of(st.none(), cuts_of(shape[dim] if shape else 1, world)))
    return ParamSpec(f"p{index}", shape, dtype, draw(st.booleans()), dim, cuts)


@st.composite
def buckets(draw: st.DrawFn, max_params: int = 5) -> BucketLayout:
    """Buckets with scalars, empty and uneven parameters, more ranks than rows, any kind of cuts."""
    world, dtype = draw(WORLDS), draw(st.sampled_from(STORED))
    num = draw(st.integers(1, max_params))
    specs = [draw(specs_of(world, dtype, i)) for i in range(num)]
    gather = draw(st.sampled_from(FLOATS)) if dtype.is_floating_point else dtype
    reduce = draw(st.sampled_from(FLOATS))
    return layout_bucket(specs, gather_dtype=gather, reduce_dtype=reduce, world=world)


def random_bucket(
    rng: random.Random,
    world: int,
    *,
    dtype: torch.dtype = torch.float32,
    gather_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    replicas: int = 1,
    exact: bool = False,
) -> BucketLayout:
    """The same kind of bucket from a seed that all ranks share; `exact`: equal parts only."""
    specs = []
    for index in range(rng.randint(1, 5)):
        shape = tuple(rng.choice(SIZES) for _ in range(rng.randint(0, 3)))
        if exact:
            shape = tuple(world * size for size in shape or (1,))
        dim = rng.randrange(len(shape)) if shape else 0
        rows = shape[dim] if shape else 1
        makers = (
            lambda n=rows: Cuts.even(n, world),
            lambda n=rows: Cuts.block(n, world, rng.randint(1, 4)),
            lambda n=rows: Cuts.whole(n, world, rng.randrange(world)),
        )
        cuts = makers[0 if exact else rng.randrange(3)]()
        specs.append(ParamSpec(f"p{index}", shape, dtype, rng.random() < 0.8, dim, cuts))
    return layout_bucket(
        specs,
        gather_dtype=gather_dtype or dtype,
        reduce_dtype=reduce_dtype,
        world=world,
        replicas=replicas,
    )


def random_whole(layout: BucketLayout, seed: int) -> list[torch.Tensor]:
    """A whole tensor for each parameter, in the stored dtype; small integers, so sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-8, 8, p.spec.shape, generator=generator).to(layout.dtype)
        for p in layout.params
    ]


def rows_of(whole: torch.Tensor, param: ParamLayout, rank: int) -> torch.Tensor:
    """What `rank` owns of a whole tensor, with the shape of its shard."""
    if not whole.dim():
        return whole.reshape(1)[param.cuts.start(rank) : param.cuts.stop(rank)].reshape(
            param.shard_shape(rank)
        )
    return whole.narrow(param.spec.shard_dim, param.cuts.start(rank), param.cuts.size(rank))


def fill_shard(
    buffer: torch.Tensor, layout: BucketLayout, whole: Sequence[torch.Tensor], rank: int
) -> None:
    """Write this rank's rows of every parameter into its shard buffer."""
    for param, tensor, at in zip(layout.params, whole, layout.shard_offsets(rank), strict=True):
        buffer[at : at + param.shard_numel(rank)] = rows_of(tensor, param, rank).reshape(-1)


def gathered(out: torch.Tensor, layout: BucketLayout) -> list[torch.Tensor]:
    """The whole parameters in a gathered buffer."""
    return [
        out[p.full_offset : p.full_offset + math.prod(p.spec.shape)].view(p.spec.shape)
        for p in layout.params
    ]
